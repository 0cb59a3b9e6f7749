"""A real node reports to a real scheduler: lent to it, taken back, lent again, killed."""

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


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    (port,), folder = free_ports(1), tmp_path_factory.mktemp("door")
    words = ["--listen", f"127.0.0.1:{port}", "--ledger", str(folder / "ledger.sqlite")]
    made = Process(port, folder / "scheduler.log", "-m", "rose.cli", "scheduler", *words)
    made.await_health()
    yield made
    made.end()


class Device:
    """A dedicated one that reports."""

    def __init__(self, folder: Path, scheduler: str) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        (folder / "node.toml").write_text(
            f"""
device = "cpu:0"
kv_gb = 0.05
page = "/dev/shm/rose-reporting-{uuid.uuid4().hex}"
port = {port}
scheduler = "{scheduler}"
lease_s = 3
log_dir = "{folder}"

[rollout]
model = "tiny-b"
"""
        )
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "rose.cli", "node", str(self._folder / "node.toml")]
        with (self._folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def device(
    door: Process, tmp_path_factory: pytest.TempPathFactory, rose_home: Path
) -> Iterator[Device]:
    made = Device(tmp_path_factory.mktemp("device"), door.url)
    yield made
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(60) == 0


def lease(door: Process) -> str | None:
    engines = call(f"{door.url}/rose/v1/status")[1]["engines"]
    return engines[0]["lease"] if engines else None


def generate(door: Process) -> tuple[int, Any]:
    sampling = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
    return call(f"{door.url}/inference/v1/generate", body)


def test_a_device_is_lent_taken_back_and_lent_again(door: Process, device: Device) -> None:
    with ThreadPoolExecutor(1) as pool:
        status, first = pool.submit(generate, door).result()  # before there is any engine
        assert (status, len(first["choices"][0]["token_ids"])) == (200, 8)
        assert lease(door) == "active"
        assert call(f"{device.url}/revoke", b"")[0] == 200
        until(lambda: lease(door) == "taken back")
        waiting = pool.submit(generate, door)
        assert call(f"{device.url}/status")[1]["state"] == "dormant"
        assert not waiting.done()
        assert call(f"{device.url}/activate", b"")[0] == 200
        status, again = waiting.result()
    assert (status, again["choices"][0]["token_ids"]) == (200, first["choices"][0]["token_ids"])


def test_a_turn_outlives_the_node_of_its_device(door: Process, device: Device) -> None:
    status, first = generate(door)
    assert status == 200
    device.kill()
    until(lambda: lease(door) is None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, door)
        until(lambda: call(f"{door.url}/rose/v1/status")[1]["jobs"]["default"]["waiting"] == 1)
        device.start()
        status, again = waiting.result()
    assert (status, again["choices"][0]["token_ids"]) == (200, first["choices"][0]["token_ids"])


def test_what_is_taken_back_stays_so_when_the_node_is_killed(door: Process, device: Device) -> None:
    until(lambda: lease(door) == "active")
    assert call(f"{device.url}/revoke", b"")[0] == 200
    device.kill()
    until(lambda: lease(door) is None)
    device.start()
    until(lambda: lease(door) == "taken back")
    assert call(f"{device.url}/status")[1]["offered"] is False
    assert call(f"{device.url}/activate", b"")[0] == 200
    until(lambda: lease(door) == "active")


def test_a_lease_ends_with_its_scheduler(door: Process, device: Device) -> None:
    until(lambda: lease(door) == "active")
    door.end()
    until(lambda: call(f"{device.url}/status")[1]["state"] == "dormant")
    door.start()
    door.await_health()
    assert generate(door)[0] == 200
    assert lease(door) == "active"
