"""Where the processes of a cluster run: a small interface, and this machine.

Whoever supervises knows `Launcher` and `Handle` only, so that a Ray launcher can come beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from rose.cluster.config import NodeConfig
from rose.cluster.engine import Engine
from rose.cluster.memo import Memo
from rose.executor.page import Page, PageError, Reading
from rose.executor.processes import is_alive

STOP_S = 30.0
"""A node gives its engines `engine.STOP_S` and ends after them; who takes longer is killed."""
LEAVE_S = 2.0
"""For what ends by itself after its parent, as Python's resource trackers do."""
LOOK_S = 0.05
MOST_WORDS = 300
RECENT = 1 << 16
"""Bytes of a log in which the reason of an end is looked for."""
TELLING = re.compile(r"^rose: |\w+(?:Error|Exception): ")


@dataclass(frozen=True)
class Process:
    name: str
    command: tuple[str, ...]
    url: str
    """http: it is healthy when /health answers 200; tcp: when it takes a connection."""
    secret: str = field(default="", repr=False)
    node: NodeConfig | None = None
    """Of a node: its engines outlive it, so whoever stops it has to look for them."""


class Handle(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """None while it runs; below 0: the signal that killed it."""

    def last_words(self) -> str:
        """The line of its log that most likely says why it ended."""

    async def stop(self) -> None:
        """It, and all that it started, is gone afterwards."""


class Launcher(Protocol):
    def start(self, process: Process) -> Handle: ...


class Local:
    """Child processes of this one, each with a log of its own in one folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._started: set[int] = set()

    def start(self, process: Process) -> Child:
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{process.name}.log"
        with log.open("ab") as sink:
            began = sink.tell()
            child = subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                # Same POSIX session as all others (autogroup), own group (no Ctrl-C).
                process_group=0,
            )
        self._started.add(child.pid)
        return Child(process, child, log, began, self._started)


class Child:
    def __init__(
        self,
        process: Process,
        child: subprocess.Popen[bytes],
        log: Path,
        log_began: int,
        ours: Collection[int],
    ) -> None:
        self._process = process
        self._child = child
        self._log = log
        self._log_began = log_began
        self._ours = ours
        """Pids of everything that its launcher ever started."""
        self._reaped = False

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        code = self._child.poll()
        if code is not None and not self._reaped:
            self._reaped = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # a killed node's `rose profile`, say
        return code

    def last_words(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._log_began, self._log.stat().st_size - RECENT))
                said = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"{self._log}: {error.strerror}"
        lines = [line.strip() for line in said if line.strip()]
        telling = [line for line in lines if TELLING.search(line)]
        line = (telling or lines or ["no output"])[-1].removeprefix("rose: ")
        return f"{line[:MOST_WORDS]} (see {self._log})"

    async def stop(self) -> None:
        members = _family(self.pid) if self.alive else []
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            await _until(lambda: not self.alive, STOP_S)
            self._child.kill()
            await _until(lambda: not self.alive, STOP_S)
        if self._process.node is not None:
            await _end_engines(self._process.node, self._ours)
        await _until(lambda: not any(map(_lives, members)), LEAVE_S)
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


async def _end_engines(node: NodeConfig, ours: Collection[int]) -> None:
    """What a dead node left; that of somebody else's node is left alone."""
    memo = Memo.of(node)
    try:
        if json.loads(memo.path.read_text())["node"] not in ours:
            return
    except (OSError, ValueError):
        return
    engines, cores = memo.recall(node.device), _cores(node)
    left = {role: Engine(role, "", pid, None) for role, pid in cores.items()} | engines
    await asyncio.gather(*(_end(engine, cores.get(role)) for role, engine in left.items()))
    taken_back = memo.taken_back or _taken_back(node)
    if taken_back:
        memo.remember([], offered=False)
    kept = taken_back and memo.unwritten
    if not kept and (node.serving is None or not node.serving.attach):
        node.page_path.unlink(missing_ok=True)
    memo.forget()


def _taken_back(node: NodeConfig) -> bool:
    """Whether the orders that a dead node left say so: no disk may have taken it."""
    try:
        page = Page.open(node.page_path)
    except PageError:
        return False
    orders = page.node()
    page.close()
    return orders is not None and not orders.facts.offered


async def _end(engine: Engine, core: int | None) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # gone between two looks
        await engine.stop(also=core)
    if engine.alive:
        await engine.stop(gently=False)


def _cores(node: NodeConfig) -> dict[str, int]:
    """Pids of the engines' cores that live, which may be orphans; never of an attached engine."""
    try:
        page = Page.open(node.page_path)
    except PageError:
        return {}
    readings: dict[str, Reading[Any] | None] = {"rollout": page.rollout()}
    if node.serving is not None and not node.serving.attach:
        readings["serving"] = page.serving()
    page.close()
    return {role: r.writer.pid for role, r in readings.items() if r and is_alive(r.writer)}


def _family(pid: int) -> list[psutil.Process]:
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def _until(true: Callable[[], bool], most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        if true():
            return
        await asyncio.sleep(LOOK_S)
