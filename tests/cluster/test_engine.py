"""An engine's life and end: nothing that cannot be asked is dead, nothing waits for ever."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rose.cluster import engine as module
from rose.cluster.engine import KILL_S, STOP_S, Engine
from rose.executor import processes

FAKE_PID = 4_200_000
"""Above the kernel's largest."""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"], process_group=0)
    yield process
    process.kill()
    process.wait()


def of(child: subprocess.Popen[bytes]) -> Engine:
    engine = Engine("rollout", "http://127.0.0.1:1", child.pid, None)
    engine._process = child
    return engine


def no_descriptors(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


# ---- life


def test_an_engine_that_cannot_be_asked_is_alive(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = of(child)
    assert engine.alive
    monkeypatch.setattr(processes, "process_start", no_descriptors)
    assert engine.alive


def test_one_that_is_gone_is_not(child: subprocess.Popen[bytes]) -> None:
    engine = of(child)
    child.kill()
    child.wait()
    assert not engine.alive


# ---- end


class Member:
    """A process that ends after so many looks, once it is told to; never for None."""

    def __init__(self, ends_after: int | None, *, tracker: bool = False) -> None:
        self.ends_after = ends_after
        self.words = ["python", "resource_tracker"] if tracker else ["vllm"]
        self.killed = False

    def cmdline(self) -> list[str]:
        if self.killed and not self.is_running():
            raise psutil.NoSuchProcess(FAKE_PID)
        return self.words

    def kill(self) -> None:
        self.killed = True

    def is_running(self) -> bool:
        if not self.killed or self.ends_after is None:
            return True
        self.ends_after -= 1
        return self.ends_after >= 0

    def status(self) -> str:
        return str(psutil.STATUS_DISK_SLEEP)


class Time:
    """As long as somebody sleeps, and no longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(sleep=self._sleep))

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def family(monkeypatch: pytest.MonkeyPatch, *members: Member) -> Engine:
    engine = Engine("rollout", "http://127.0.0.1:1", 0, None)
    engine.pid = FAKE_PID
    monkeypatch.setattr(engine, "family", lambda: list(members))
    return engine


def test_what_does_not_end_is_told_within_the_time_that_a_kill_takes(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    stuck, other = Member(None), Member(3)
    assert asyncio.run(family(monkeypatch, other, stuck).stop(gently=False)) is False
    assert stuck.killed
    assert other.killed
    assert time.now <= KILL_S + 0.05


def test_what_ends_is_waited_for_no_longer_than_it_takes(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    assert asyncio.run(family(monkeypatch, Member(3), Member(5)).stop(gently=False)) is True
    assert time.now <= 0.2


def test_an_engine_that_is_gone_is_stopped_at_once(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    assert asyncio.run(family(monkeypatch).stop()) is True
    assert time.now == 0.0


def test_the_resource_tracker_is_left_to_end_by_itself(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    tracker = Member(None, tracker=True)
    assert asyncio.run(family(monkeypatch, Member(1), tracker).stop(gently=False)) is True
    assert not tracker.killed


def test_a_gentle_stop_kills_what_does_not_go(
    monkeypatch: pytest.MonkeyPatch, time: Time, child: subprocess.Popen[bytes]
) -> None:
    engine = of(child)
    stuck = Member(None)
    monkeypatch.setattr(engine, "family", lambda: [stuck])
    assert asyncio.run(engine.stop()) is False
    assert stuck.killed
    assert STOP_S < time.now <= STOP_S + KILL_S + 0.1
    assert child.wait(60) == -signal.SIGTERM


def test_an_orphaned_core_is_ended_too(child: subprocess.Popen[bytes]) -> None:
    engine = Engine("rollout", "", FAKE_PID, None)
    reaped: list[int] = []

    async def stop() -> bool:
        reaper = asyncio.create_task(asyncio.to_thread(child.wait, 60))
        stopped = await engine.stop(also=child.pid, gently=False)
        reaped.append(await reaper)
        return stopped

    assert asyncio.run(stop()) is True
    assert reaped == [-signal.SIGKILL]
    assert asyncio.run(engine.stop(also=FAKE_PID, gently=False)) is True


@pytest.mark.parametrize("gently", [True, False])
def test_without_descriptors_the_whole_group_is_killed(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, gently: bool
) -> None:
    engine = of(child)
    monkeypatch.setattr(engine, "family", no_descriptors)
    assert asyncio.run(engine.stop(gently=gently)) is True
    assert child.wait(60) == -signal.SIGKILL


def test_a_process_in_a_foreign_group_takes_nobody_with_it(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    child = subprocess.Popen(["sleep", "600"])  # in the group of this very process
    engine = of(child)
    killed: list[Callable[..., None]] = []
    monkeypatch.setattr(module.os, "killpg", lambda *_: killed.append(os.killpg))
    monkeypatch.setattr(engine, "family", no_descriptors)
    assert asyncio.run(engine.stop()) is False
    assert not killed
    child.kill()
    child.wait()


def test_an_engine_that_goes_between_two_looks_is_no_error(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that an earlier node has started: somebody else reaps it."""
    engine = Engine("rollout", "", child.pid, Path("/dev/null"))
    child.kill()
    child.wait()
    monkeypatch.setattr(Engine, "alive", property(lambda _: True))
    assert asyncio.run(engine.stop()) is True


def test_a_child_has_ended_when_it_can_be_reaped(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    """The main thread of a process may be a zombie while others of it run on."""
    looks = [None, None, None]
    engine = family(monkeypatch, Member(0))
    engine._process = SimpleNamespace(poll=lambda: looks.pop() if looks else -9)  # type: ignore[assignment]
    assert asyncio.run(engine.stop(gently=False)) is True
    assert not looks
    assert time.now > 0.0


def test_a_child_that_cannot_be_reaped_has_not_ended(
    monkeypatch: pytest.MonkeyPatch, time: Time
) -> None:
    """A thread of it is held by the kernel, and its memory with it."""
    engine = family(monkeypatch, Member(0))
    engine._process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
    assert asyncio.run(engine.stop(gently=False)) is False
    assert time.now <= KILL_S + 0.05


def test_one_that_ends_just_as_it_is_looked_at_leaves_no_zombie(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(process: psutil.Process) -> bool:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return sound(process)

    sound = module._runs
    monkeypatch.setattr(module, "_runs", runs)
    monkeypatch.setattr(module, "_ends_by_itself", lambda _: False)
    assert asyncio.run(of(child).stop(gently=False)) is True
    assert not psutil.pid_exists(child.pid)
