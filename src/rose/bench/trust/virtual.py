"""Virtual time: an asyncio loop that never waits, and processes that live in it.

A simulated process is a set of tasks. It can be killed (its tasks end, its descriptors are closed,
so that the kernel drops its locks), stopped, held by the kernel (state D), and left without
descriptors. Nothing here knows of devices.
"""

from __future__ import annotations

import asyncio
import errno
import os
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from rose.executor.processes import Kernel, Writer

FIRST_PID = 1 << 23
"""Above every pid of a Linux host: nothing that is done to a simulated process hits a real one."""


class Stalled(Exception):
    """Nothing will ever happen again."""


class _NoWait(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stalled("no task waits for any time")
        self.loop.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when everybody waits, and not otherwise."""

    def __init__(self, now: float = 1_000.0) -> None:
        selector = _NoWait()
        selector.loop = self
        self.now = now
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class Process:
    """One simulated process."""

    def __init__(self, table: Table, name: str, pid: int) -> None:
        self.name = name
        self.writer = Writer(pid, pid)
        self.table = table
        self.alive = True
        self.stopped = False
        self.held = False
        """By the kernel: it neither runs nor dies."""
        self.dying = False
        """Killed while it was held."""
        self.no_descriptors = False
        self.at_end: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._runs = asyncio.Event()
        self._runs.set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._runs.wait()

    async def wait(self, event: asyncio.Event, most_s: float) -> None:
        """Until the event is set, or time is up."""
        if not event.is_set() and most_s > 0:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(most_s, event.set)
            try:
                await event.wait()
            finally:
                timer.cancel()
        event.clear()
        await asyncio.sleep(0.0005)
        await self._runs.wait()

    def stop(self) -> None:
        self.stopped = True
        self._settle()

    def cont(self) -> None:
        self.stopped = False
        self._settle()

    def hold(self, held: bool) -> None:
        self.held = held
        self._settle()
        if not held and self.dying:
            self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        if self.held:
            self.dying = True
            return
        if not self.alive:
            return
        self.alive = False
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        for end in self.at_end:
            end()
        self._runs.set()

    def _settle(self) -> None:
        if self.stopped or self.held:
            self._runs.clear()
        else:
            self._runs.set()


class Table:
    """All processes, dead ones too."""

    def __init__(self) -> None:
        self._processes: dict[int, Process] = {}

    def start(self, name: str) -> Process:
        pid = FIRST_PID + len(self._processes)
        made = self._processes[pid] = Process(self, name, pid)
        return made

    def get(self, pid: int) -> Process | None:
        return self._processes.get(pid)

    @property
    def living(self) -> list[Process]:
        return [process for process in self._processes.values() if process.alive]


class SimKernel(Kernel):
    """What the kernel tells one simulated process about the others."""

    def __init__(self, asker: Process) -> None:
        super().__init__()
        self._asker = asker

    def _ask(self, pid: int) -> Process | None:
        if self._asker.no_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._asker.table.get(pid)

    def start_of(self, pid: int) -> int | None:
        found = self._ask(pid)
        return found.writer.started if found is not None and found.alive else None

    def open(self, pid: int) -> int:
        self._ask(pid)
        return pid

    def has_ended(self, pidfd: int) -> bool:
        found = self._asker.table.get(pidfd)
        return found is None or not found.alive

    def send_kill(self, pidfd: int) -> None:
        found = self._asker.table.get(pidfd)
        if found is None:
            raise ProcessLookupError
        found.kill()

    def stopped(self, writer: Writer) -> bool:
        found = self._asker.table.get(writer.pid)
        return found is not None and found.alive and found.stopped

    def let_go(self, pidfd: int) -> None:
        """A pidfd is a pid here."""
