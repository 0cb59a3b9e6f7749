"""A whole cluster by one command: whatever is killed comes back, and at the end nothing is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from tests.conftest import ours
from tests.scheduler.conftest import call, until

from rose import models
from rose.cluster import profiles
from rose.executor.latency import Profile
from rose.net import free_ports
from rose.transfer import Publisher
from rose.transfer.store import open_store

pytestmark = [pytest.mark.engine, pytest.mark.node]


class Up:
    """`rose up` with a home of its own, by which its processes are known."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.home = home
        self.folder = folder / "cluster"
        self.page = Path(f"/dev/shm/rose-up-{uuid.uuid4().hex}")
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "up.log"
        file = folder / "cluster.toml"
        file.write_text(
            f"""
folder = "{self.folder}"
[scheduler]
port = {port}
[weights]
[relay]
[[node]]
device = "cpu:0"
kv_gb = 0.05
page = "{self.page}"
[node.rollout]
model = "tiny-b"
"""
        )
        words = [sys.executable, "-m", "rose.cli", "up", str(file)]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT)

    def said(self, words: str) -> int:
        assert self.process.poll() is None, self.log.read_text()
        return self.log.read_text().count(words)

    def kill(self, name: str, word: str) -> None:
        """Wait until it is up again."""
        before = self.said(f"{name} is up at ")
        found = [p for p in psutil.Process(self.process.pid).children() if word in p.cmdline()]
        (one,) = found
        one.kill()
        until(lambda: self.said(f"{name} is up at ") > before)
        assert f"{name} got signal 9, starting it again in 1 s: " in self.log.read_text()

    def tokens(self) -> list[int]:
        sampling = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}
        body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
        status, answer = call(f"{self.url}/inference/v1/generate", body)
        assert status == 200, answer
        return list(answer["choices"][0]["token_ids"])

    def versions(self) -> list[Any]:
        return [engine["version"] for engine in call(f"{self.url}/rose/v1/status")[1]["engines"]]

    def engine(self) -> int:
        (found,) = [p.pid for p in ours(self.home) if "vllm.entrypoints" in " ".join(p.cmdline())]
        return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    home = tmp_path / "home"
    monkeypatch.setenv("ROSE_HOME", str(home))
    profile = Profile("tiny-b", "cpu:0", 0.004, 3e-5, 1e-4, 0.0, margin=2.5, error=0.1)
    profile.save(profiles.path_for("tiny-b", "auto", "cpu:0"))
    made = Up(tmp_path, home)
    yield made
    for process in (made.process, *ours(home)):
        process.kill()
    made.process.wait()


def test_what_is_killed_comes_back_and_nothing_is_left(cluster: Up) -> None:
    until(lambda: cluster.said("your framework's vLLM server is "))
    first, engine = cluster.tokens(), cluster.engine()
    assert len(first) == 8
    cluster.kill("scheduler", "scheduler")
    assert cluster.tokens() == first

    weights = load_file(next(models.resolve("tiny-b").glob("*.safetensors")))
    store = open_store(f"file://{cluster.folder / 'store'}", "default")
    publisher = Publisher(store, wire="float32")
    publisher.publish(weights)
    until(lambda: cluster.versions() == ["0"])
    cluster.kill("relay", "relay")
    publisher.publish(weights)
    publisher.settle()
    until(lambda: cluster.versions() == ["1"])
    assert cluster.tokens() == first

    cluster.kill("node-cpu0", "node")
    assert cluster.tokens() == first
    assert cluster.engine() == engine, "the node did not find its engine again"

    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(60) == 0, cluster.log.read_text()
    left = [f"{p.pid} {' '.join(p.cmdline())[:200]}" for p in ours(cluster.home)]
    assert not left
    assert not list(cluster.page.parent.glob(f"{cluster.page.name}*"))
    logs = cluster.folder / "logs"
    for name in ("store", "relay", "scheduler", "node-cpu0", "up", "node-cpu0/rollout"):
        assert (logs / f"{name}.log").stat().st_size, f"{name} has no log"
