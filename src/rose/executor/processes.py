"""Which processes live, and how one that holds a device's memory is ended.

Death alone frees memory, so it must be certain. A process of which the kernel does not say that it
is gone (no descriptors left to ask with) counts as alive. Who may have to be killed is held by a
pidfd from the first look on: killing then needs no descriptor, and never hits another process that
was given the same pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

REMEMBERED = 8
"""Processes whose pidfds are kept: those of one device, and a few that they replaced."""


@dataclass(frozen=True)
class Writer:
    """The process that wrote a section: a pid alone may have been given to another process."""

    pid: int
    started: int


class Processes(Protocol):
    """What the kernel knows of processes; a simulation has a table of its own."""

    def alive(self, writer: Writer) -> bool:
        """False only when the process is certainly gone."""

    def stopped(self, writer: Writer) -> bool:
        """Whether the process is known to be stopped (SIGSTOP)."""

    def kill(self, writer: Writer) -> None:
        """Send SIGKILL; no error when it is gone or not ours."""

    def close(self) -> None:
        """Nobody is asked about any more."""


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the name; None when the process is gone.

    Raises OSError when that cannot be known.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()


def process_start(pid: int) -> int | None:
    """Start time of a live process in clock ticks; None when it is gone or a zombie.

    Raises OSError when that cannot be known.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def is_alive(writer: Writer) -> bool:
    try:
        return writer.pid > 0 and process_start(writer.pid) == writer.started
    except OSError:
        return True


class Kernel:
    """The processes of this host. What it is asked is in six methods; a simulation has others."""

    def __init__(self) -> None:
        self._pidfds: dict[Writer, int] = {}
        self._dead: set[Writer] = set()

    # ---- what the kernel says

    def start_of(self, pid: int) -> int | None:
        return process_start(pid)

    def open(self, pid: int) -> int:
        return os.pidfd_open(pid)

    def let_go(self, pidfd: int) -> None:
        os.close(pidfd)

    def has_ended(self, pidfd: int) -> bool:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        return bool(ended.poll(0))

    def send_kill(self, pidfd: int) -> None:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def stopped(self, writer: Writer) -> bool:
        with contextlib.suppress(OSError):
            fields = _stat(writer.pid)
            return fields is not None and fields[0] == "T" and int(fields[19]) == writer.started
        return False

    # ---- what follows

    def close(self) -> None:
        for writer in list(self._pidfds):
            self._forget(writer)

    def alive(self, writer: Writer) -> bool:
        pidfd = self._pidfd(writer)
        if pidfd is not None and self.has_ended(pidfd):
            self._bury(writer)
        return writer not in self._dead

    def kill(self, writer: Writer) -> None:
        if (pidfd := self._pidfd(writer)) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self.send_kill(pidfd)

    def _pidfd(self, writer: Writer) -> int | None:
        """None when the process is gone (then it is noted as dead), or when nothing is left to ask
        the kernel with."""
        known = self._pidfds.get(writer)
        if known is not None or writer in self._dead:
            return known
        try:
            pidfd = self._opened(writer)
        except OSError:
            return None
        if pidfd is None:
            self._bury(writer)
            return None
        while len(self._pidfds) >= REMEMBERED:
            self._forget(next(iter(self._pidfds)))
        self._pidfds[writer] = pidfd
        return pidfd

    def _opened(self, writer: Writer) -> int | None:
        """None when the process is gone. Whose pid it is is asked after the pidfd was opened: what
        is held cannot be given to another process any more."""
        if writer.pid <= 0:
            return None
        try:
            pidfd = self.open(writer.pid)
        except ProcessLookupError:
            return None
        mine = False
        try:
            mine = self.start_of(writer.pid) == writer.started
        finally:
            if not mine:
                self.let_go(pidfd)
        return pidfd if mine else None

    def _bury(self, writer: Writer) -> None:
        if len(self._dead) >= REMEMBERED:
            self._dead.clear()
        self._dead.add(writer)
        self._forget(writer)

    def _forget(self, writer: Writer) -> None:
        if (pidfd := self._pidfds.pop(writer, None)) is not None:
            self.let_go(pidfd)
