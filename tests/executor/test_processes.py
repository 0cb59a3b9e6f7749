"""Who wrote the page: life and death of processes. Only certain death counts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rose.executor import processes
from rose.executor.processes import REMEMBERED, Kernel, Writer, is_alive, process_start

ME = Writer(os.getpid(), process_start(os.getpid()) or 0)
Spawn = Callable[[], tuple[subprocess.Popen[bytes], Writer]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a process that sleeps."""
    children = []

    def start() -> tuple[subprocess.Popen[bytes], Writer]:
        child = subprocess.Popen(["sleep", "600"])
        children.append(child)
        return child, Writer(child.pid, process_start(child.pid) or 0)

    yield start
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    asked = Kernel()
    yield asked
    asked.close()


def no_descriptors(*_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def exhausted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on this process has no descriptors left to ask with."""

    def exhaust() -> None:
        monkeypatch.setattr(Path, "read_text", no_descriptors)
        monkeypatch.setattr(processes.os, "pidfd_open", no_descriptors)

    return exhaust


def test_a_live_process_is_alive_and_a_recycled_pid_is_not(kernel: Kernel) -> None:
    for alive in (is_alive, kernel.alive):
        assert alive(ME)
        assert not alive(replace(ME, started=ME.started + 1))
        assert not alive(Writer(0, 0))


def test_a_zombie_and_a_dead_process_are_not_alive(spawn: Spawn, kernel: Kernel) -> None:
    child, writer = spawn()
    assert is_alive(writer)
    assert kernel.alive(writer)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}/stat").exists()
    assert not is_alive(writer)
    assert not kernel.alive(writer)
    child.wait()
    assert not is_alive(writer)
    assert not kernel.alive(writer)


def test_what_cannot_be_asked_is_not_death(
    spawn: Spawn, kernel: Kernel, exhausted: Callable[[], None]
) -> None:
    _, known = spawn()
    _, never_seen = spawn()
    assert kernel.alive(known)
    exhausted()
    with pytest.raises(OSError, match="Too many open files"):
        process_start(never_seen.pid)
    assert is_alive(never_seen)
    assert kernel.alive(never_seen)
    assert kernel.alive(known)
    assert not kernel.stopped(known)


def test_who_must_die_is_killed_without_a_descriptor(
    spawn: Spawn, kernel: Kernel, exhausted: Callable[[], None]
) -> None:
    child, writer = spawn()
    assert kernel.alive(writer)
    exhausted()
    kernel.kill(writer)
    assert child.wait(60) == -signal.SIGKILL
    assert not kernel.alive(writer)


def test_nobody_is_killed_by_a_pid_that_may_be_anothers(
    spawn: Spawn, kernel: Kernel, exhausted: Callable[[], None]
) -> None:
    child, writer = spawn()
    exhausted()
    kernel.kill(writer)
    assert child.poll() is None
    assert kernel.alive(writer)


def test_who_is_dead_stays_dead_when_nothing_can_be_asked(
    spawn: Spawn, kernel: Kernel, exhausted: Callable[[], None]
) -> None:
    child, writer = spawn()
    assert kernel.alive(writer)
    child.kill()
    child.wait()
    exhausted()
    assert not kernel.alive(writer)
    assert not kernel.alive(writer)


def test_a_recycled_pid_is_not_killed(spawn: Spawn, kernel: Kernel) -> None:
    child, writer = spawn()
    kernel.kill(replace(writer, started=writer.started - 1))
    kernel.kill(Writer(0, 0))  # pid 0 would be everybody in this process group
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.1)


@pytest.mark.parametrize("looks", range(4))
def test_a_pid_that_is_recycled_between_two_looks_is_not_held(
    spawn: Spawn, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """After so many looks the process has ended, and another one has its pid."""
    _, other = spawn()
    gone = replace(other, started=other.started - 1)
    whose = iter([gone] * looks)
    held: dict[int, Writer] = {}
    hit: list[Writer] = []

    def pidfd_open(pid: int) -> int:
        descriptor = os.dup(0)
        held[descriptor] = next(whose, other)
        return descriptor

    monkeypatch.setattr(processes, "process_start", lambda pid: next(whose, other).started)
    monkeypatch.setattr(processes.os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(
        processes.signal, "pidfd_send_signal", lambda pidfd, _: hit.append(held[pidfd])
    )
    monkeypatch.setattr(processes.os, "kill", lambda *_: hit.append(next(whose, other)))
    for _ in range(2):
        kernel.kill(gone)
    assert set(hit) <= {gone}


def test_a_stopped_process_is_told_from_a_running_one(spawn: Spawn, kernel: Kernel) -> None:
    child, writer = spawn()
    assert not kernel.stopped(writer)
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert kernel.stopped(writer)
    assert not kernel.stopped(replace(writer, started=writer.started + 1))
    assert kernel.alive(writer)
    kernel.kill(writer)
    assert child.wait(60) == -signal.SIGKILL


def test_killing_who_is_gone_is_no_error(spawn: Spawn, kernel: Kernel) -> None:
    child, writer = spawn()
    assert kernel.alive(writer)
    child.kill()
    child.wait()
    kernel.kill(writer)
    Kernel().kill(writer)


def test_descriptors_of_those_long_replaced_are_given_back(spawn: Spawn) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    kernel, before = Kernel(), descriptors()
    for _ in range(REMEMBERED + 3):
        child, writer = spawn()
        assert kernel.alive(writer)
    assert descriptors() - before == REMEMBERED
    child.kill()
    child.wait()
    assert not kernel.alive(writer)
    assert descriptors() - before == REMEMBERED - 1
    kernel.close()
    assert descriptors() == before
