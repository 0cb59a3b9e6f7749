"""Who may write a section, and what a second serving engine does to what the first one says."""

from __future__ import annotations

import errno
import fcntl
import itertools
import multiprocessing
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rose.executor.facts import FACTS_S, RolloutFacts, ServingFacts
from rose.executor.lender import Lender
from rose.executor.page import RIVAL, SECTION, Page

fork = multiprocessing.get_context("fork")
PATIENCE_S = 60.0
"""For what must happen, on a machine of any speed."""
NOW = 1000.0
FACTS = ServingFacts(written=NOW, ttft_s=1.0, tpot_s=0.1, kv_max=9)
Again = Callable[[], Page]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page.create(tmp_path / "page", kv_total=1 << 30, device="cpu0")
    yield made
    if made._fd >= 0:
        made.close()


@pytest.fixture
def again(page: Page) -> Iterator[Again]:
    """Open the page once more, as another process does."""
    opened: list[Page] = []

    def open_it() -> Page:
        opened.append(Page.open(page.path))
        return opened[-1]

    yield open_it
    for one in opened:
        if one._fd >= 0:
            one.close()


@pytest.mark.parametrize("section", sorted(SECTION))
def test_a_section_has_one_owner_until_its_page_is_closed(
    page: Page, again: Again, section: str
) -> None:
    first, second = again(), again()
    assert first.own(section)
    assert first.own(section)
    assert not second.own(section)
    assert all(second.own(other) for other in SECTION if other != section)
    first.close()
    assert second.own(section)


def _own(path: Path, answers: Any) -> None:
    answers.put(Page.open(path).own("serving"))
    signal.pause()


def test_a_killed_process_owns_nothing(page: Page) -> None:
    answers = fork.Queue()
    owner = fork.Process(target=_own, args=(page.path, answers), daemon=True)
    owner.start()
    assert answers.get(timeout=PATIENCE_S) is True
    assert not page.own("serving")
    os.kill(owner.pid or 0, signal.SIGSTOP)
    assert not page.own("serving")
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join(PATIENCE_S)
    assert page.own("serving")


def _race(path: Path, start: Any, answers: Any) -> None:
    page = Page.open(path)
    start.wait(PATIENCE_S)
    answers.put(page.own("serving"))
    start.wait(PATIENCE_S)


def test_of_many_who_start_at_once_one_owns_the_section(page: Page) -> None:
    start, answers = fork.Barrier(4), fork.Queue()
    racers = [
        fork.Process(target=_race, args=(page.path, start, answers), daemon=True) for _ in range(4)
    ]
    for racer in racers:
        racer.start()
    won = [answers.get(timeout=PATIENCE_S) for _ in racers]
    for racer in racers:
        racer.join(PATIENCE_S)
    with pytest.raises(Empty):
        answers.get_nowait()
    assert sorted(won) == [False, False, False, True]


def test_ownership_outlives_a_truncated_page(page: Page, again: Again) -> None:
    assert page.own("rollout")
    os.truncate(page.path, 0)
    page.mend(lambda: NOW)
    assert not again().own("rollout")


def test_what_else_goes_wrong_is_not_another_owner(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", broken)
    with pytest.raises(OSError, match="No locks"):
        page.own("serving")


def test_closing_a_page_wakes_nobody_to_their_death(page: Page, again: Again) -> None:
    mine = again()
    waits = threading.Thread(target=mine.wait, args=("gate", mine.bell("gate"), 0.2))
    waits.start()
    mine.close()
    waits.join(PATIENCE_S)
    assert not waits.is_alive()
    with pytest.raises(OSError, match="descriptor"):
        mine.ring("gate")


# ---- what serving says while there are two


def test_facts_that_come_while_they_are_read_are_relied_upon(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.count(NOW, 0.001)
    read = page._read

    def meanwhile(section: str) -> Any:
        page.publish("serving", replace(FACTS, written=next(moments)))
        return read(section)

    monkeypatch.setattr(page, "_read", meanwhile)
    assert page.lending(lambda: next(moments)) is not None


def test_a_rival_that_comes_while_the_page_is_mended_is_not_forgotten(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.count(NOW, 0.001)
    read = page._intruded

    def meanwhile() -> float:
        page.intrude(next(moments))
        return read()

    monkeypatch.setattr(page, "_intruded", meanwhile)
    page.mend(lambda: next(moments))
    monkeypatch.undo()
    assert page.rival(NOW)


def test_while_a_rival_is_here_nothing_is_lent(page: Page) -> None:
    page.publish("serving", FACTS)
    assert page.lending(lambda: NOW) is not None
    page.intrude(NOW)
    for later in (0.0, FACTS_S, 2 * FACTS_S - 0.001):
        page.publish("serving", replace(FACTS, written=NOW + later))
        assert page.rival(NOW + later)
        assert page.lending(itertools.repeat(NOW + later).__next__) is None
    later = NOW + 2 * FACTS_S
    page.publish("serving", replace(FACTS, written=later))
    assert not page.rival(later)
    assert page.lending(lambda: later) is not None


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
def test_garbage_in_the_rivals_word_stops_lending_until_it_is_mended(
    page: Page, garbage: float
) -> None:
    page.publish("serving", FACTS)
    os.pwrite(page._fd, struct.pack("<d", garbage), RIVAL)
    assert page.lending(lambda: NOW) is None
    page.mend(lambda: NOW)
    assert page.lending(lambda: NOW) is not None


def test_a_rivals_word_that_is_cut_off_counts_as_one(page: Page) -> None:
    os.truncate(page.path, RIVAL + 3)
    assert page.rival(NOW)
    page.mend(lambda: NOW)
    assert not page.rival(NOW)


def test_mending_leaves_a_rival_that_is_here(page: Page) -> None:
    page.intrude(NOW)
    assert page.mend(lambda: NOW) is False
    assert page.rival(NOW)


@pytest.mark.parametrize("age", [FACTS_S + 0.001, -0.001, 1e6])
def test_facts_of_another_time_are_not_relied_upon(page: Page, age: float) -> None:
    page.publish("serving", replace(FACTS, written=NOW))
    assert page.serving() is not None
    assert page.lending(lambda: NOW + age) is None
    assert page.lending(lambda: NOW + FACTS_S) is not None


def test_a_serving_engine_is_a_rival_until_the_other_is_gone(page: Page, again: Again) -> None:
    parking: Any = SimpleNamespace(block_bytes=1, blocks=9, usable=9, used=0)
    first, second = (
        Lender(one, parking, 0.2, threading.Lock(), slice_bytes=1, owns=one.own("serving"))
        for one in (page, again())
    )
    page.publish("serving", FACTS)
    page.publish("rollout", RolloutFacts())
    first.stand(NOW)
    assert page.lending(lambda: NOW) is not None
    second.stand(NOW)
    assert (first.owns, second.owns) == (True, False)
    assert page.lending(lambda: NOW) is None
    page.close()
    second.stand(NOW + 1.0)
    assert second.owns
    assert not second._page.rival(NOW + 1.0)  # its last word as a rival is as old
