"""Keeps the processes of a cluster running.

They start in the order in which they need each other, each when those before it are healthy; nodes
start at once. What dies is started again after a pause, which doubles until the process has lived
for a minute; a node finds its engines again. Exit code 2 is a user's error: everything ends with
that process's sentence. Whatever ends the block, nothing that was started is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rose.claims import claim
from rose.cluster import profiles
from rose.cluster.cluster_config import LOCK, ClusterConfig, NodeSection, check, settle
from rose.cluster.config import ConfigError
from rose.cluster.launcher import Handle, Launcher, Local, Process
from rose.cluster.processes import node_file, node_toml, processes
from rose.cluster.restarts import next_pause
from rose.scheduler.cli import SECRET

LOOK_S = 0.2
ANSWER_S = 5.0
"""A node asks its engines before it answers."""
USER_ERROR = 2

Say = Callable[[str], None]


class Supervisor:
    def __init__(self, launcher: Launcher, session: aiohttp.ClientSession, say: Say) -> None:
        self.failure: BaseException | None = None
        """Why everything ends."""
        self._launcher = launcher
        self._session = session
        self._say = say
        self._owner = asyncio.current_task()
        self._handles: dict[str, Handle] = {}
        self._healthy: dict[str, asyncio.Event] = {}
        self._keeping: list[asyncio.Task[None]] = []

    def pid(self, name: str) -> int:
        return self._handles[name].pid

    async def start(self, stages: Sequence[Sequence[Process]]) -> None:
        for stage in stages:
            for process in stage:
                self._healthy[process.name] = asyncio.Event()
                self._keeping.append(asyncio.create_task(self._keep(process)))
                self._keeping[-1].add_done_callback(self._fail)
            await asyncio.gather(*(self._healthy[process.name].wait() for process in stage))

    async def _keep(self, process: Process) -> None:
        pause = 0.0
        while True:
            began = time.monotonic()
            handle = self._handles[process.name] = self._launcher.start(process)
            if await self._comes_up(process, handle):
                took = time.monotonic() - began
                self._say(f"{process.name} is up at {process.url} after {took:.1f} s")
                self._healthy[process.name].set()
            code = await _end(handle)
            if code == USER_ERROR:
                raise ConfigError(f"{process.name}: {handle.last_words()}")
            how = f"ended with exit code {code}" if code >= 0 else f"got signal {-code}"
            pause = next_pause(pause, time.monotonic() - began)
            words = handle.last_words()
            self._say(f"{process.name} {how}, starting it again in {pause:g} s: {words}")
            await asyncio.sleep(pause)

    async def _comes_up(self, process: Process, handle: Handle) -> bool:
        while handle.alive:
            if await _answers(self._session, process):
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _fail(self, ended: asyncio.Task[None]) -> None:
        if ended.cancelled() or self.failure is not None or self._owner is None:
            return
        self.failure = ended.exception()
        self._owner.cancel()

    async def stop(self) -> None:
        self._owner = None
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        stops = (handle.stop() for handle in self._handles.values())
        ended = await asyncio.gather(*stops, return_exceptions=True)
        for name, error in zip(self._handles, ended, strict=True):
            if error is not None:
                self._say(f"{name} could not be stopped: {error}")


async def _end(handle: Handle) -> int:
    while True:
        if (code := handle.exit_code) is not None:
            return code
        await asyncio.sleep(LOOK_S)


async def _answers(session: aiohttp.ClientSession, process: Process) -> bool:
    where = urlsplit(process.url)
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            if where.scheme == "tcp":
                _, writer = await asyncio.open_connection(where.hostname, where.port)
                writer.close()
                return True
            headers = {"Authorization": f"Bearer {process.secret}"} if process.secret else {}
            async with session.get(f"{process.url}/health", headers=headers) as answer:
                return answer.status == 200
    return False


@asynccontextmanager
async def supervising(
    stages: Sequence[Sequence[Process]], launcher: Launcher, say: Say
) -> AsyncIterator[Supervisor]:
    """Everything is healthy inside, and gone afterwards; a user's error ends the block."""
    owner = asyncio.current_task()
    assert owner is not None
    async with aiohttp.ClientSession() as session:
        supervisor = Supervisor(launcher, session, say)
        try:
            await supervisor.start(stages)
            yield supervisor
        except asyncio.CancelledError:
            if supervisor.failure is None or owner.uncancel():
                raise
            raise supervisor.failure from None
        finally:
            await _undisturbed(supervisor.stop())


async def _undisturbed(work: Coroutine[Any, Any, None]) -> None:
    """To its end, whoever cancels meanwhile: what is not stopped now would be left."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


@dataclass(frozen=True)
class Cluster:
    """One that runs."""

    config: ClusterConfig
    pid: Callable[[str], int]
    """Of `store`, `relay`, `scheduler`, or a node by its name."""

    @property
    def scheduler_url(self) -> str:
        return self.config.scheduler_url

    @property
    def store_folder(self) -> Path:
        return self.config.store_folder

    @property
    def store_url(self) -> str:
        """For publishers."""
        return self.config.store_url

    @property
    def weights_url(self) -> str:
        """For engines."""
        return self.config.weights_url

    @property
    def nodes(self) -> tuple[NodeSection, ...]:
        return self.config.node


@asynccontextmanager
async def running(config: ClusterConfig, say: Say = print) -> AsyncIterator[Cluster]:
    """A whole cluster on this machine, for as long as the block lasts."""
    say("looking at models, memory and ports")
    await asyncio.to_thread(check, config)
    secret = os.environ.get(SECRET, "")
    config = settle(config, secret)
    with _claimed(config):
        noted = _noting(say, config.logs / "up.log")
        async with supervising(_stages(config, secret), Local(config.logs), noted) as supervisor:
            yield Cluster(config, supervisor.pid)


def _stages(config: ClusterConfig, secret: str) -> list[list[Process]]:
    """One after the other, and the nodes together, unless one has to measure its device first:
    what its neighbours do meanwhile would be in the numbers."""
    found = processes(config, secret)
    alone = [[one] for one in found if one.node is None]
    nodes = [one for one in found if one.node is not None]
    together = all(map(_is_measured, config.node))
    return [*alone, nodes] if together else [*alone, *([one] for one in nodes)]


def _is_measured(node: NodeSection) -> bool:
    if node.where.gpu is not None:
        return True
    engines = [one for one in (node.rollout, node.serving) if one is not None]
    return all(profiles.path_for(e.model, e.dtype, node.device).exists() for e in engines)


@contextmanager
def _claimed(config: ClusterConfig) -> Iterator[None]:
    """The cluster's folder, with what its processes need in it, is nobody else's meanwhile."""
    with contextlib.ExitStack() as held:
        try:
            config.folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(claim(config.folder / LOCK))
            _fill(config)
        except BlockingIOError:
            raise ConfigError(f"folder: {config.folder} is that of a cluster that runs") from None
        except OSError as error:
            raise ConfigError(f"folder: {error.filename}: {error.strerror}") from error
        yield


def _fill(config: ClusterConfig) -> None:
    config.logs.mkdir(exist_ok=True)
    for job in config.jobs:
        (config.store_folder / job.name).mkdir(parents=True, exist_ok=True)
    for node in config.node:
        file = node_file(config, node)
        file.parent.mkdir(exist_ok=True)
        file.touch(mode=0o600)  # there may be secrets in it
        file.write_text(node_toml(node))


def _noting(say: Say, file: Path) -> Say:
    def both(line: str) -> None:
        with contextlib.suppress(OSError), file.open("a") as log:  # a full disk ends nothing
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
        say(line)

    return both
