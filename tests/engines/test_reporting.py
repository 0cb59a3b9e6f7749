"""A real node reports to a real scheduler: lent to it, taken back, lent again."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.scheduler.conftest import Process, call, until

from rose.net import free_ports


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Process]:
    (port,) = free_ports(1)
    words = ["--listen", f"127.0.0.1:{port}", "--ledger", str(tmp_path / "ledger.sqlite")]
    made = Process(port, tmp_path / "scheduler.log", "-m", "rose.cli", "scheduler", *words)
    made.await_health()
    yield made
    made.end()


@pytest.fixture
def node(door: Process, tmp_path: Path, rose_home: Path) -> Iterator[str]:
    """A dedicated device that reports."""
    (port,) = free_ports(1)
    config = tmp_path / "node.toml"
    config.write_text(
        f"""
device = "cpu:0"
kv_gb = 0.05
page = "/dev/shm/rose-reporting-{uuid.uuid4().hex}"
port = {port}
scheduler = "{door.url}"
log_dir = "{tmp_path}"

[rollout]
model = "tiny-b"
"""
    )
    with (tmp_path / "node.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rose.cli", "node", str(config)], stdout=log, stderr=log
        )
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def lease(door: Process) -> str | None:
    engines = call(f"{door.url}/rose/v1/status")[1]["engines"]
    return engines[0]["lease"] if engines else None


def generate(door: Process) -> tuple[int, Any]:
    sampling = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
    return call(f"{door.url}/inference/v1/generate", body)


def test_a_device_is_lent_taken_back_and_lent_again(door: Process, node: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        status, first = pool.submit(generate, door).result()  # before there is any engine
        assert (status, len(first["choices"][0]["token_ids"])) == (200, 8)
        assert lease(door) == "active"
        assert call(f"{node}/revoke", b"")[0] == 200
        until(lambda: lease(door) == "taken back")
        waiting = pool.submit(generate, door)
        assert call(f"{node}/status")[1]["state"] == "dormant"
        assert not waiting.done()
        assert call(f"{node}/activate", b"")[0] == 200
        status, again = waiting.result()
    assert (status, again["choices"][0]["token_ids"]) == (200, first["choices"][0]["token_ids"])
