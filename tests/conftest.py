"""One real co-serving node for the whole run, started once, and proof that it leaves nothing.

`node` is a `rose node` process with both engines (tiny models made on the spot, latency profiles
ready-made so that nothing is measured). `stock` is a process beside it in which stock and patched
engines answer a fixed set of prompts; it starts at the same moment.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from rose.cluster import profiles
from rose.executor.facts import LeaseState, RolloutFacts, ServingFacts
from rose.executor.latency import Profile
from rose.executor.page import Page

# No deadlines: a busy machine makes single examples slow, which says nothing about the code.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=2000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

START_S = 240.0
"""Two engines and the stock process import vLLM at once: most of a minute on two cores."""
SERVING, ROLLOUT = "tiny-a", "tiny-b"
KV_GB = 0.0625
"""64 MiB: a dozen long serving prompts cross the watermark, two dozen long turns fill the rest."""
PROMISES = {"ttft_ms": 500, "tpot_ms": 100}


@pytest.fixture(scope="session")
def rose_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """$ROSE_HOME with both tiny models and profiles that need no measuring."""
    home = tmp_path_factory.mktemp("rose-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROSE_HOME", str(home))
        for model in (SERVING, ROLLOUT):
            path = profiles.path_for(model, "auto", "cpu:0")
            Profile(model, "cpu:0", 0.004, 3e-5, 1e-4, 0.0, margin=2.5, error=0.1).save(path)
        yield home


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = 25) -> str:
    """The end of a log, without the leak report that Triton's bindings print at every exit."""
    text = log.read_text(errors="replace") if log.exists() else "(no log)"
    said = [line for line in text.splitlines() if "leaked" not in line and "nanobind" not in line]
    return "\n".join([f"--- {log.name}", *said[-lines:]])


def call(method: str, url: str, timeout: float = 60.0) -> tuple[int, Any]:
    """Status and body (decoded when it is JSON) of a small request."""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read()
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body.decode()


@dataclass
class RunningNode:
    """A `rose node` process, its API, and the page it shares with its engines."""

    folder: Path
    page_path: Path
    url: str
    process: subprocess.Popen[bytes] | None = None
    _page: Page | None = None

    @property
    def config(self) -> Path:
        return self.folder / "node.toml"

    def write_config(self) -> None:
        promises = "\n".join(f"{name} = {value}" for name, value in PROMISES.items())
        self.config.write_text(
            f"""
device = "cpu:0"
kv_gb = {KV_GB}
page = "{self.page_path}"
port = {self.url.rpartition(":")[2]}
log_dir = "{self.folder}"

[serving]
model = "{SERVING}"
{promises}

[rollout]
model = "{ROLLOUT}"
args = ["--enable-prompt-tokens-details"]
"""
        )

    def start(self) -> None:
        with (self.folder / "node.log").open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rose.cli", "node", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def logs(self) -> str:
        return "\n".join(tail(self.folder / f"{n}.log") for n in ("node", "serving", "rollout"))

    def await_ready(self, timeout: float = START_S) -> None:
        """Wait until the node and both engines are healthy and the rollout engine is dormant."""
        deadline = time.monotonic() + timeout
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                pytest.fail(f"the node ended with {self.process.returncode}\n{self.logs()}")
            try:
                if call("GET", f"{self.url}/health")[0] == 200:
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                pytest.fail(f"the node is not healthy after {timeout:.0f} s\n{self.logs()}")
            time.sleep(0.2)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    @property
    def page(self) -> Page:
        if self._page is None:
            self._page = Page.open(self.page_path)
        return self._page

    def status(self) -> Any:
        return call("GET", f"{self.url}/status")[1]

    @property
    def serving_url(self) -> str:
        return str(self.status()["serving"]["url"])

    @property
    def rollout_url(self) -> str:
        return str(self.status()["rollout"]["url"])

    def activate(self) -> None:
        status, body = call("POST", f"{self.url}/activate")
        assert (status, body["state"]) == (200, "active"), body

    def revoke(self) -> None:
        status, body = call("POST", f"{self.url}/revoke")
        assert (status, body["state"]) == (200, "dormant"), body

    def drain(self) -> None:
        status, body = call("POST", f"{self.url}/drain")
        assert status == 200, body

    def serving(self) -> ServingFacts:
        return self.until(self.page.serving, "serving's half is readable").facts

    def rollout(self) -> RolloutFacts:
        return self.until(self.page.rollout, "rollout's half is readable").facts

    def core(self, role: str) -> int:
        """Process id of an engine's core, as it says on the page."""
        read = self.page.serving if role == "serving" else self.page.rollout
        return int(self.until(read, f"{role}'s half is readable").writer.pid)

    def until(self, condition: Callable[[], Any], what: str, timeout: float = 150.0) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            if time.monotonic() > deadline:
                page = json.dumps(self.page.describe(), indent=1)
                pytest.fail(f"never happened: {what}\n{page}\n{self.logs()}")
            time.sleep(0.02)
        return found


@dataclass
class Stock:
    """The process of `engines/inprocess.py`: one JSON file per task as soon as it is done."""

    folder: Path
    process: subprocess.Popen[bytes]

    def result(self, task: str, timeout: float = START_S) -> Any:
        deadline = time.monotonic() + timeout
        path = self.folder / f"{task}.json"
        while not path.exists():
            ended = self.process.poll() is not None
            if (ended or time.monotonic() > deadline) and not path.exists():
                pytest.fail(f"no result of {task}\n{tail(self.folder / 'stock.log', 60)}")
            time.sleep(0.1)
        return json.loads(path.read_text())


def ours(home: Path) -> list[psutil.Process]:
    """Live processes started for these tests: they carry our ROSE_HOME in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("ROSE_HOME") == str(home)
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="session")
def _engines(
    rose_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningNode, Stock]]:
    shm = Path("/dev/shm")
    name = f"rose-test-{os.getpid()}"
    node = RunningNode(
        tmp_path_factory.mktemp("node"), shm / name, f"http://127.0.0.1:{free_port()}"
    )
    node.write_config()
    node.start()
    folder = tmp_path_factory.mktemp("stock")
    script = Path(__file__).parent / "engines" / "inprocess.py"
    with (folder / "stock.log").open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(folder / "page")],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(10),  # the node's engines are needed first
        )
    try:
        yield node, Stock(folder, process)
    finally:
        process.terminate()
        process.wait(30)
        code = node.stop()
        left = ours(rose_home)
        described = [f"{p.pid} {' '.join(p.cmdline())[:200]}" for p in left]
        for one in left:
            one.kill()
        files = [path.name for path in shm.glob(f"{name}*")]
        for file in files:
            shm.joinpath(file).unlink(missing_ok=True)
        assert not described, f"processes left behind: {described}\n{node.logs()}"
        assert not files, f"files left in shared memory: {files}"
        assert code == 0, f"the node ended with {code}\n{node.logs()}"


@pytest.fixture(scope="session")
def stock(_engines: tuple[RunningNode, Stock]) -> Stock:
    return _engines[1]


@pytest.fixture
def node(_engines: tuple[RunningNode, Stock]) -> Iterator[RunningNode]:
    """The node, healthy and with a dormant rollout engine before and after the test."""
    running = _engines[0]
    running.await_ready()
    if running.status()["state"] != "dormant":
        running.revoke()
    yield running
    try:
        if running.status()["state"] != "dormant":
            running.revoke()
    except OSError:
        pass  # a test that broke the node has failed already; the next one restarts or reports it


@pytest.fixture
def active_node(node: RunningNode) -> RunningNode:
    node.activate()
    assert node.rollout().state == LeaseState.ACTIVE
    return node
