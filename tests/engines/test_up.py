"""A whole cluster by one command, and a job that trains on it: whatever is killed comes back, the
job goes on, and at the end nothing is left."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from tests.conftest import ours
from tests.scheduler.conftest import call, until
from transformers import AutoTokenizer

from rose import models
from rose.cluster import profiles
from rose.executor.latency import Profile
from rose.models.player import TEMPLATE
from rose.net import free_ports
from rose.rl import report
from rose.rl.metrics import METRICS
from rose.transfer import Publisher
from rose.transfer.store import open_store

pytestmark = [pytest.mark.engine, pytest.mark.node]


class Up:
    """`rose up` with a home of its own, by which its processes are known."""

    def __init__(self, folder: Path, home: Path, model: Path) -> None:
        self.home = home
        self.model = model
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
model = "{model}"
max_model_len = 512
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

    @property
    def weights(self) -> str:
        return self._url("relay")

    @property
    def node(self) -> str:
        return self._url("node-cpu0")

    def _url(self, name: str) -> str:
        found = re.findall(rf"{name} is up at (\S+)", self.log.read_text())
        return str(found[-1])

    def versions(self) -> list[Any]:
        return [engine["version"] for engine in call(f"{self.url}/rose/v1/status")[1]["engines"]]

    def engines(self) -> list[int]:
        return [p.pid for p in ours(self.home) if "vllm.entrypoints" in " ".join(p.cmdline())]

    def engine(self) -> int:
        (found,) = self.engines()
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    home = folder / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROSE_HOME", str(home))
        model = models.make_tiny(folder / "model", hidden=96, kv_heads=1, seed=1)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE  # one that ends turns
        tokenizer.save_pretrained(model)
        profile = Profile("tiny", "cpu:0", 0.004, 3e-5, 1e-4, 0.0, margin=2.5, error=0.1)
        profile.save(profiles.path_for(str(model), "auto", "cpu:0"))
        made = Up(folder, home, model)
        yield made
        for process in (made.process, *ours(home)):
            process.kill()
        made.process.wait()


class Training:
    """`rose train` against the cluster."""

    STEPS, TASKS, SAMPLES = 24, 2, 4

    def __init__(self, cluster: Up, folder: Path) -> None:
        self.out = folder / "out"
        self._log = folder / "train.log"
        self._file = folder / "run.toml"
        self._file.write_text(
            f"""
name = "survives"
model = "{cluster.model}"
out = "{self.out}"
scheduler = "{cluster.url}"
store = "file://{cluster.folder}/store"
weights = "{cluster.weights}"
wire = "float32"
[train]
steps = {self.STEPS}
tasks = {self.TASKS}
samples = {self.SAMPLES}
learning_rate = 1e-3
threads = 1
[episodes]
environment = "gym:tests.rl.letters:rose/Letters-v0"
turns = 4
turn_tokens = 48
context = 256
"""
        )
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "rose.cli", "train", str(self._file)]
        root = Path(__file__).parents[2]
        with self._log.open("ab") as sink:
            self.process = subprocess.Popen(words, stdout=sink, stderr=sink, cwd=root)

    def steps(self) -> list[dict[str, Any]]:
        return report.read(self.out / METRICS)

    def go_on(self, steps: int = 1) -> None:
        """Wait until so many more are done; it is not over then."""
        wanted = len(self.steps()) + steps
        assert wanted < self.STEPS

        def done() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            return len(self.steps()) >= wanted

        until(done)


def test_a_job_survives_whatever_is_killed(cluster: Up, tmp_path: Path) -> None:
    until(lambda: cluster.said("your framework's vLLM server is "))
    training = Training(cluster, tmp_path)
    training.go_on()
    training.process.kill()
    training.process.wait()
    training.start()
    training.go_on()
    cluster.kill("scheduler", "scheduler")
    training.go_on()
    cluster.kill("relay", "relay")
    training.go_on()
    cluster.kill("node-cpu0", "node")
    training.go_on()
    engine = cluster.engine()
    psutil.Process(engine).kill()
    until(lambda: cluster.engines() not in ([engine], []))
    training.go_on()
    assert call(f"{cluster.node}/revoke", b"")[0] == 200  # serving takes its device back
    time.sleep(1.0)
    assert call(f"{cluster.node}/activate", b"")[0] == 200
    training.go_on()
    assert training.process.wait(120) == 0
    steps = training.steps()
    assert [row["step"] for row in steps] == list(range(1, Training.STEPS + 1))
    assert {row["episodes"] for row in steps} == {Training.TASKS * Training.SAMPLES}
    first = steps[0]["version"]
    assert [row["version"] for row in steps] == list(range(first, first + Training.STEPS))
    assert {row["staleness"] for row in steps} == {0}
    assert max(row["learned"]["logp_difference_mean"] for row in steps) < 1e-4
    assert (training.out / "training.png").exists()


def test_what_is_killed_comes_back_and_nothing_is_left(cluster: Up) -> None:
    until(lambda: cluster.said("your framework's vLLM server is "))
    first, engine = cluster.tokens(), cluster.engine()
    assert len(first) == 8
    cluster.kill("scheduler", "scheduler")
    assert cluster.tokens() == first

    weights = load_file(next(cluster.model.glob("*.safetensors")))
    store = open_store(f"file://{cluster.folder / 'store'}", "default")
    publisher = Publisher(store, wire="float32")
    version = publisher.publish(weights).step.version
    until(lambda: cluster.versions() == [str(version)])
    second = cluster.tokens()
    cluster.kill("relay", "relay")
    publisher.publish(weights)
    publisher.settle()
    until(lambda: cluster.versions() == [str(version + 1)])
    assert cluster.tokens() == second

    cluster.kill("node-cpu0", "node")
    assert cluster.tokens() == second
    assert cluster.engine() == engine, "the node did not find its engine again"

    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(60) == 0, cluster.log.read_text()
    left = [f"{p.pid} {' '.join(p.cmdline())[:200]}" for p in ours(cluster.home)]
    assert not left
    assert not list(cluster.page.parent.glob(f"{cluster.page.name}*"))
    logs = cluster.folder / "logs"
    for name in ("store", "relay", "scheduler", "node-cpu0", "up", "node-cpu0/rollout"):
        assert (logs / f"{name}.log").stat().st_size, f"{name} has no log"
