"""Real engines to be drilled: a node, its page, its clients; and what is done to processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from rose.bench import rollouts
from rose.bench.arrivals import Fixed
from rose.cluster import profiles
from rose.cluster.config import parse
from rose.cluster.engine import command, environment
from rose.executor.facts import RolloutFacts
from rose.executor.latency import Profile
from rose.executor.page import Page
from rose.net import free_ports

SERVING, ROLLOUT = "tiny-a", "tiny-b"
KV_GB = 0.0625
START_S = 180.0
LEASE_S = 5.0
PLAN = rollouts.RolloutPlan(
    in_flight=8, turns=3, prompt_tokens=Fixed(200), turn_tokens=Fixed(100), think_s=0.0
)


class DrillError(Exception):
    """The drill cannot go on; the message is one sentence."""


class Rig:
    """One device on core 0. Everything it starts carries its ROSE_HOME, and ends with it."""

    def __init__(self, out: Path, *, attach: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rose-drill-"))
        self.logs = out / "drill-logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.page_path = Path(f"/dev/shm/rose-drill-{os.getpid()}-{int(attach)}")
        self.node_port, self.serving_port, self.spare_port = free_ports(3)
        self.url = f"http://127.0.0.1:{self.node_port}"
        self.attach = attach
        self.node: subprocess.Popen[bytes] | None = None
        self.servings: list[subprocess.Popen[bytes]] = []
        self.sense = True
        """Of the scheduler's answers."""
        self._page: Page | None = None
        self._stack = contextlib.AsyncExitStack()
        self._stop_turns = asyncio.Event()
        self.tokens = 0

    # ---- start and end

    async def __aenter__(self) -> Rig:
        try:
            os.environ["ROSE_HOME"] = str(self.folder / "home")
            for model in (SERVING, ROLLOUT):
                path = profiles.path_for(model, "auto", "cpu:0")
                Profile(model, "cpu:0", 0.004, 3e-5, 1e-4, 0.0, margin=2.5, error=0.1).save(path)
            self.session = await self._stack.enter_async_context(aiohttp.ClientSession())
            self.scheduler = await self._start_scheduler()
            self._write_config()
            self.clock = self._skewed_clock()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_turns.set()
        await self._stack.aclose()
        if self.node is not None and self.node.poll() is None:
            self.node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.node.wait, 30)
        for process in _ours(os.environ["ROSE_HOME"]):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in (self.node, *self.servings):
            if child is not None:
                await asyncio.to_thread(child.wait)
        for left in self.page_path.parent.glob(f"{self.page_path.name}*"):
            left.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _start_scheduler(self) -> str:
        async def answer(_: web.Request) -> web.Response:
            if self.sense:
                return web.json_response({"order": None})
            return web.Response(text='{"order": {"fly": [1, 2]}}', content_type="application/json")

        app = web.Application()
        app.router.add_post("/rose/v1/nodes", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        (port,) = free_ports(1)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    def _write_config(self) -> None:
        serving: dict[str, Any] = {"model": SERVING, "ttft_ms": 500, "tpot_ms": 100}
        if self.attach:
            serving["attach"] = f"http://127.0.0.1:{self.serving_port}"
        self.content: dict[str, Any] = {
            "device": "cpu:0",
            "kv_gb": KV_GB,
            "page": str(self.page_path),
            "port": self.node_port,
            "log_dir": str(self.logs),
            "scheduler": self.scheduler,
            "lease_s": LEASE_S,
            "serving": serving,
            "rollout": {"model": ROLLOUT},
        }
        lines = [f"{k} = {json.dumps(v)}" for k, v in self.content.items() if type(v) is not dict]
        for name in ("serving", "rollout"):
            lines.append(f"[{name}]")
            lines += [f"{k} = {json.dumps(v)}" for k, v in self.content[name].items()]
        (self.folder / "node.toml").write_text("\n".join(lines))

    def _skewed_clock(self) -> Path | None:
        """A library that shifts the wall clock of who loads it, and the file that says how far."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            return None
        source = Path(__file__).with_name("skewed_clock.c")
        library, offset = self.folder / "clock.so", self.folder / "offset"
        words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
        subprocess.run(words, check=True, capture_output=True)
        offset.write_bytes((0).to_bytes(8, "little", signed=True))
        return offset

    def _environment(self) -> dict[str, str]:
        if self.clock is None:
            return dict(os.environ)
        library = str(self.folder / "clock.so")
        return os.environ | {"LD_PRELOAD": library, "ROSE_CLOCK_OFFSET": str(self.clock)}

    def set_clock(self, seconds: int) -> None:
        assert self.clock is not None
        with self.clock.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))

    def start_node(self) -> None:
        with (self.logs / "node.log").open("ab") as sink:
            self.node = subprocess.Popen(
                [sys.executable, "-m", "rose.cli", "node", str(self.folder / "node.toml")],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self._environment(),
            )

    async def ready(self) -> None:
        await self.until(self._healthy, "the node and both engines are up", START_S)

    async def _healthy(self) -> bool:
        if self.node is not None and self.node.poll() is not None:
            raise DrillError(f"the node ended; see {self.logs}/node.log")
        try:
            async with self.session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    def start_serving(self, port: int, *, stock: bool = False) -> subprocess.Popen[bytes]:
        """A serving engine of our own: with rose's options, or without any."""
        config = parse(self.content, "drill")
        options = {
            "device": "cpu:0",
            "page": str(self.page_path),
            "kv_total": config.kv_total,
            "profile": str(profiles.path_for(SERVING, "auto", "cpu:0")),
            "device_cores": config.where.cores,
            "host_cores": config.where.host_cores,
            "ttft_ms": 500.0,
            "tpot_ms": 100.0,
        }
        words = command(config, "serving", port, options)
        if stock:
            for option in ("--scheduler-cls", "--additional-config", "--worker-cls"):
                where = words.index(option)
                del words[where : where + 2]
        name = "stock" if stock else f"serving-{port}"
        with (self.logs / f"{name}.log").open("ab") as sink:
            made = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(config, "serving"),
            )
        self.servings.append(made)
        return made

    async def serves(self, port: int) -> None:
        async def healthy() -> bool:
            try:
                async with self.session.get(f"http://127.0.0.1:{port}/health") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await self.until(healthy, "the serving engine is up", START_S)

    # ---- what is seen

    @property
    def page(self) -> Page:
        if self._page is None:
            self._page = Page.open(self.page_path)
        return self._page

    def rollout(self) -> RolloutFacts | None:
        reading = self.page.rollout()
        return reading.facts if reading is not None else None

    def core(self, role: str) -> int:
        reading: Any = self.page.serving() if role == "serving" else self.page.rollout()
        if reading is None:
            raise DrillError(f"{role}'s half of the page cannot be read")
        return int(reading.writer.pid)

    def is_free(self) -> bool:
        """No rollout step may come, nothing is claimed, all memory is back."""
        reading = self.page.rollout()
        if reading is None:
            return False
        if not self.page.processes.alive(reading.writer):
            return True
        facts = reading.facts
        return not (facts.kv_claim or facts.kv_resident or facts.running)

    async def until(self, true: Callable[[], Any], what: str, most_s: float = 30.0) -> float:
        began = time.monotonic()
        while True:
            found = true()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return time.monotonic() - began
            if time.monotonic() - began > most_s:
                raise DrillError(f"never happened: {what}; logs are in {self.logs}")
            await asyncio.sleep(0.002)

    # ---- what is asked

    async def post(self, route: str, timeout_s: float = 30.0) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.session.post(f"{self.url}{route}", timeout=timeout) as answer:
            return answer.status, await answer.json()

    async def status(self) -> Any:
        async with self.session.get(f"{self.url}/status") as answer:
            return await answer.json()

    async def lend(self) -> None:
        """Lend the device, and wait until rollouts run on it and hold memory."""
        code, said = await self.post("/activate")
        if code != 200:
            raise DrillError(f"/activate answered {code}: {said.get('error')}")
        before = facts.granted if (facts := self.rollout()) else 0

        def runs() -> bool:
            now = self.rollout()
            return now is not None and now.granted > before + 5 and now.running >= 4

        await self.until(runs, "rollouts run", 60.0)

    def start_turns(self, url: str) -> None:
        """Trajectories without end, resumed whenever they are cut."""

        def count(_: float, tokens: int) -> None:
            self.tokens += tokens

        work = rollouts.drive(url, PLAN, self._stop_turns, model=ROLLOUT, on_tokens=count)
        task = asyncio.create_task(work)

        async def end() -> None:
            self._stop_turns.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._stack.push_async_callback(end)


def _ours(home: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("ROSE_HOME") == home and process.pid != os.getpid():
                yield process


@contextlib.contextmanager
def without_writing(pid: int) -> Iterator[None]:
    """A process that cannot write any file: not the page either."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def without_descriptors(pid: int, spare: int = 0) -> Iterator[None]:
    """A process that can open `spare` more files, and then none."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + spare, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.send_signal(signal.SIGKILL)
