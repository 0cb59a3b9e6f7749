from __future__ import annotations

import errno
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rose.executor import priority
from rose.executor.priority import DEFAULT_DELAY_S, WORKS_BELOW, Preemption

fork = multiprocessing.get_context("fork")


def test_measure_tells_what_this_host_does() -> None:
    core = min(os.sched_getaffinity(0))
    seen = priority.measure(core, seconds=0.2)
    assert 0.0 <= seen.idle_share <= 1.0
    assert seen.works == (seen.idle_share < WORKS_BELOW)
    assert DEFAULT_DELAY_S <= seen.delay_s < 60.0
    assert f"{seen.idle_share:.0%}" in str(seen)


def test_measure_leaves_the_caller_as_it_was() -> None:
    before = os.sched_getaffinity(0), os.sched_getscheduler(0)
    priority.measure(min(before[0]), seconds=0.05)
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == before


@pytest.mark.parametrize(("works", "words"), [(True, "preemption works"), (False, "does NOT work")])
def test_the_verdict_is_one_sentence(works: bool, words: str) -> None:
    assert words in str(Preemption(works, 0.05, 0.002))


def test_compute_threads_has_the_caller_and_no_other_python_thread() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    found = priority.compute_threads()
    stop.set()
    other.join()
    assert found[0] == threading.get_native_id()
    assert other.native_id not in found
    assert len(found) == len(set(found))


def _change_class(result: Connection) -> None:
    priority.run_idle()
    lowered = priority.is_idle()
    lifted = priority.run_normal()
    result.send((lowered, lifted, priority.is_idle()))


def test_a_process_lowers_itself_and_learns_whether_it_can_rise() -> None:
    mine, theirs = fork.Pipe()
    child = fork.Process(target=_change_class, args=(theirs,))
    child.start()
    lowered, lifted, idle_after = mine.recv()
    child.join()
    assert lowered
    assert idle_after != lifted


def _crawl(ready: Connection, then: Callable[[], object]) -> None:
    priority.run_idle()
    ready.send(None)
    ready.recv()
    then()
    ready.send(os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.parametrize("then", [priority.run_idle, priority.run_normal])
def test_a_lifted_process_goes_ahead_until_it_falls_back(then: Callable[[], object]) -> None:
    mine, theirs = fork.Pipe()
    child = fork.Process(target=_crawl, args=(theirs, then))
    child.start()
    assert child.pid is not None
    mine.recv()
    priority.lift(child.pid)
    may_rise = not priority.is_idle(child.pid)
    ahead = os.getpriority(os.PRIO_PROCESS, child.pid)
    mine.send(None)
    nice_after = mine.recv()
    child.join()
    assert ahead in ((priority.AHEAD, 0) if may_rise else (0,))
    assert nice_after == 0


def test_all_threads_are_lifted_also_where_none_may_go_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def refuse(kind: int, thread: int, nice: int) -> None:
        asked.append(thread)
        raise PermissionError

    monkeypatch.setattr("rose.executor.priority.is_idle", lambda thread: True)
    monkeypatch.setattr("rose.executor.priority.run_normal", lambda thread: True)
    monkeypatch.setattr("rose.executor.priority.os.setpriority", refuse)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    priority.lift(os.getpid())
    stop.set()
    other.join()
    assert {os.getpid(), other.native_id} <= set(asked)


def test_lifting_a_process_that_is_gone_is_no_error() -> None:
    child = fork.Process(target=int)
    child.start()
    child.join()
    assert child.pid is not None
    assert priority.run_normal(child.pid) is False


def test_pin_puts_threads_on_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        priority.pin([threading.get_native_id()], [min(before)])
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_lifting_without_descriptors_left_fails_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: Path) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(priority, "is_idle", lambda _: True)
    monkeypatch.setattr(Path, "iterdir", none_left)
    priority.lift(os.getpid())
