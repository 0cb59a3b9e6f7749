"""Emulated engines and a real scheduler in front of them, as processes, for `rose bench scheduler`.

The scheduler has a core to itself if there are two; engines and agents share the others.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from rose.bench.emulated import Attempt
from rose.net import free_ports
from rose.scheduler.facts import Speed

HOSTS = 4
"""Processes that engines are spread over."""
INTERVAL = 8
"""Tokens per event."""
SLOWER = (1.0, 1.0, 1.5, 2.0)
"""A fleet has devices of several kinds."""
PREFIX_TOKENS = 30_000
"""Kept by an engine: those of some trajectories, not of all."""
REVOKED_PER_MIN = 0.1
"""Share of the engines."""
AWAY_S = 10.0
"""A device that serving took comes back after this."""
START_S = 60.0
_CORES = sorted(os.sched_getaffinity(0))
_OURS, _OTHERS = _CORES[:1], _CORES[1:] or _CORES
"""The scheduler's core, and everybody else's."""


class Fleet:
    """Emulated engines."""

    def __init__(self, session: aiohttp.ClientSession, urls: list[str]) -> None:
        self._session = session
        self.urls = urls

    async def set(self, number: int, **what: Any) -> None:
        async with self._session.post(f"{self.urls[number]}/emulate", json=what) as answer:
            answer.raise_for_status()

    async def prepare(self, speed: Speed) -> None:
        """As new: empty caches, and the speeds of a mixed fleet."""
        for number in range(len(self.urls)):
            slower = SLOWER[number % len(SLOWER)]
            own = {name: value * slower for name, value in msgspec.structs.asdict(speed).items()}
            await self.set(number, revoked=True)
            await self.set(
                number, revoked=False, speed=own, interval=INTERVAL, capacity=PREFIX_TOKENS
            )
        await self.attempts()

    async def attempts(self) -> list[tuple[str, Attempt]]:
        """Requests since the last time, by the id that the agent gave; several if it was cut."""
        found = []
        for url in self.urls:
            async with self._session.get(f"{url}/emulate") as answer:
                told = msgspec.json.decode(await answer.read(), type=dict[str, Attempt])
            found += [(_given(id_), attempt) for id_, attempt in told.items()]
        return found

    async def take_back(self, seed: int) -> None:
        """Serving takes a device every now and then, and gives it back later; until cancelled."""
        rng = random.Random(seed)
        every_s = 60.0 / (REVOKED_PER_MIN * len(self.urls))
        async with asyncio.TaskGroup() as away:
            while True:
                await asyncio.sleep(rng.expovariate(1 / every_s))
                away.create_task(self._away(rng.randrange(len(self.urls))))

    async def _away(self, number: int) -> None:
        await self.set(number, revoked=True)
        await asyncio.sleep(AWAY_S)
        await self.set(number, revoked=False)


def _given(id_: str) -> str:
    """The scheduler's ids are JOB/GIVEN/NUMBER-ATTEMPT."""
    return id_.split("/")[1] if "/" in id_ else id_


class Door:
    """A scheduler."""

    def __init__(self, session: aiohttp.ClientSession, words: list[str], log: Path) -> None:
        self._session = session
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._words = [*words, "--listen", f"127.0.0.1:{port}"]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self.spawn()
        await _healthy(self._session, self.url, self._log)

    def spawn(self) -> None:
        self._process = _start(self._log, _OURS, "rose.cli", "scheduler", *self._words)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def status(self) -> Any:
        async with self._session.get(f"{self.url}/rose/v1/status") as answer:
            return await answer.json()

    @property
    def used(self) -> tuple[float, int]:
        """CPU seconds and bytes of memory."""
        assert self._process is not None
        process = psutil.Process(self._process.pid)
        cpu = process.cpu_times()
        return cpu.user + cpu.system, process.memory_info().rss


@asynccontextmanager
async def fleet(engines: int, log: Path) -> AsyncIterator[Fleet]:
    ports = [str(port) for port in free_ports(engines)]
    async with aiohttp.ClientSession() as session:
        with ExitStack() as stack:
            for host in range(min(HOSTS, engines)):
                stack.enter_context(_running(log, "rose.bench.emulated", *ports[host::HOSTS]))
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            for url in urls:
                await _healthy(session, url, log)
            yield Fleet(session, urls)


@asynccontextmanager
async def door(of: Fleet, folder: Path, *options: str) -> AsyncIterator[Door]:
    """A new scheduler with a new ledger."""
    ledger = folder / f"{time.monotonic_ns()}.sqlite"
    words = [word for url in of.urls for word in ("--engine", url)]
    async with aiohttp.ClientSession() as session:
        made = Door(session, [*words, "--ledger", str(ledger), *options], folder / "scheduler.log")
        try:
            await made.start()
            yield made
        finally:
            made.kill()


def away_from_the_scheduler() -> None:
    """This process, with the agents, leaves the scheduler's core to it."""
    psutil.Process().cpu_affinity(_OTHERS)


@contextmanager
def _running(log: Path, *words: str) -> Iterator[None]:
    process = _start(log, _OTHERS, *words)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _start(log: Path, cores: list[int], *words: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as sink:
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=sink, stderr=sink)
    psutil.Process(process.pid).cpu_affinity(cores)
    return process


async def _healthy(session: aiohttp.ClientSession, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            async with session.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass  # not yet
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} does not answer; see {log}")
        await asyncio.sleep(0.01)
