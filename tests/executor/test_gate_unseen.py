"""What cannot be seen, or is not known, shuts the gate: serving's half, a rival, a new arrival."""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.executor import processes
from rose.executor.admission import CHUNK, RULES, Refusal, Terms
from rose.executor.facts import FACTS_S, ServingFacts
from rose.executor.gate import BLIND, Gate
from rose.executor.latency import Profile, Tracker
from rose.executor.page import ARRIVALS, SECTION, Page

NOW = 1000.0
IDLE = ServingFacts(written=NOW, ttft_s=1.0, tpot_s=0.5, clear_with_new_s=0.2)
PROFILE = Profile("m", "d", 0.01, 0.001, 0.002, 0.0, margin=1.25, error=0.0)
TURNS = 4


class Bench:
    """A page, a gate that reads it, and a clock that stands still."""

    def __init__(self, page: Page, *, dedicated: bool = False) -> None:
        self.page = page
        self.now = NOW
        self.terms = Terms()
        self.gate = Gate(
            page,
            Tracker(PROFILE),
            lambda: 0.0,
            dedicated=dedicated,
            chunk=CHUNK,
            clock=lambda: self.now,
        )

    def granted(self, *, look: bool = True) -> bool:
        """Whether a step may begin; `look`: the thread aside has looked at the page just now."""
        if look:
            self.gate.decide(self.terms, active=True, turns=TURNS, context=0)
        granted = self.gate.granted(TURNS, self.now) > 0
        self.gate.begun += granted
        return granted


@pytest.fixture
def bench(page: Page) -> Bench:
    page.publish("serving", IDLE)
    bench = Bench(page)
    assert bench.granted()
    return bench


def never_written(page: Page) -> None:
    os.pwrite(page._fd, bytes(200), SECTION["serving"])


def torn(page: Page) -> None:
    os.pwrite(page._fd, struct.pack("<I", 3), SECTION["serving"])


def garbled(page: Page) -> None:
    os.pwrite(page._fd, b"\xa5" * 8, SECTION["serving"] + 40)


def implausible(page: Page) -> None:
    page.publish("serving", replace(IDLE, next_step_s=-1.0))


def cut_off(page: Page) -> None:
    os.truncate(page.path, SECTION["serving"] + 10)


def old(page: Page) -> None:
    page.publish("serving", replace(IDLE, written=NOW - FACTS_S - 0.001))


def of_a_time_to_come(page: Page) -> None:
    page.publish("serving", replace(IDLE, written=NOW + 0.001))


def without_a_time(page: Page) -> None:
    page.publish("serving", replace(IDLE, written=0.0))


def not_alone(page: Page) -> None:
    page.intrude(NOW - FACTS_S)


def not_known_to_be_alone(page: Page) -> None:
    page.intrude(math.nan)


UNSEEN = [
    never_written,
    torn,
    garbled,
    implausible,
    cut_off,
    old,
    of_a_time_to_come,
    without_a_time,
    not_alone,
    not_known_to_be_alone,
]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("unseen", UNSEEN)
def test_a_serving_engine_that_cannot_be_seen_shuts_the_gate(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    unseen: Callable[[Page], None],
    lives: bool,
    rule: str,
) -> None:
    """Whether its process lives is no excuse, and no rule asks less."""
    monkeypatch.setattr(bench.page.processes, "alive", lambda _: lives)
    bench.terms = Terms(rule)
    unseen(bench.page)
    assert not bench.granted()
    assert bench.gate._decided.window.binding == Refusal.PAGE
    bench.page.mend(lambda: NOW)
    bench.page.intrude(0.0)
    bench.page.publish("serving", IDLE)
    assert bench.granted()


def test_a_dead_serving_engine_is_believed_for_as_long_as_its_facts_and_no_longer(
    bench: Bench,
) -> None:
    bench.page._me = changed(bench.page._me, started=1)  # nobody
    bench.page.publish("serving", IDLE)
    assert bench.page.processes.alive(bench.page._me) is False
    assert bench.granted()
    bench.now = NOW + FACTS_S
    assert bench.granted()
    bench.now = NOW + FACTS_S + 0.001
    assert not bench.granted()


def test_a_window_ends_with_its_facts_even_if_nobody_looks_again(bench: Bench) -> None:
    bench.now = NOW + FACTS_S
    assert bench.granted(look=False)
    bench.now = NOW + FACTS_S + 0.001
    assert not bench.granted(look=False)


def test_no_descriptors_are_no_reason_to_lend(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(processes, "process_start", none_left)
    monkeypatch.setattr(processes.os, "pidfd_open", none_left)
    assert bench.granted()
    bench.now = NOW + FACTS_S + 0.001
    assert not bench.granted()


def test_what_is_void_shuts_the_gate_until_somebody_looks_again(bench: Bench) -> None:
    bench.gate.void()
    assert not bench.granted(look=False)
    assert bench.granted()


def test_a_device_without_serving_asks_nobody(page: Page) -> None:
    alone = Bench(page, dedicated=True)
    assert alone.granted()
    page.arrive(7)
    page.intrude(NOW)
    os.truncate(page.path, 0)
    assert alone.granted()
    assert alone.granted(look=False)


# ---- the arrivals word


def test_a_request_that_the_facts_do_not_know_shuts_the_gate_at_once(bench: Bench) -> None:
    bench.page.arrive(1)
    assert not bench.granted(look=False)
    assert not bench.granted()
    bench.page.publish("serving", replace(IDLE, arrivals=1))
    assert not bench.granted(look=False)  # the window still rests on what was known before
    assert bench.granted()


def test_many_steps_are_granted_while_nobody_comes(bench: Bench) -> None:
    bench.page.publish("serving", replace(IDLE, arrivals=5))
    bench.page.arrive(5)
    assert bench.granted()
    assert all(bench.granted(look=False) for _ in range(20))


def test_a_word_that_cannot_be_read_is_not_the_one_that_is_known(bench: Bench) -> None:
    os.truncate(bench.page.path, ARRIVALS + 4)
    assert bench.page.arrivals() == -1
    assert not bench.granted(look=False)


@pytest.mark.parametrize("rule", BLIND)
def test_baselines_that_look_at_nothing_do_not_look_at_arrivals(bench: Bench, rule: str) -> None:
    bench.terms = Terms(rule)
    bench.page.arrive(1)
    assert bench.granted()


@pytest.mark.parametrize("rule", sorted(set(RULES) - set(BLIND)))
def test_all_other_rules_do(bench: Bench, rule: str) -> None:
    bench.terms = Terms(rule)
    assert bench.granted()
    bench.page.arrive(1)
    assert not bench.granted()


Words = st.lists(st.sampled_from(["comes", "told", "looked", "asked"]), max_size=40)


@given(Words)
def test_no_step_begins_beside_a_request_that_its_window_does_not_know(words: list[str]) -> None:
    with _opened() as bench:
        came = told = looked = 0
        for word in words:
            if word == "comes":
                came += 1
                bench.page.arrive(came)
            elif word == "told":
                told = came
                bench.page.publish("serving", replace(IDLE, arrivals=told))
            elif word == "looked":
                looked = told
                bench.gate.decide(bench.terms, active=True, turns=TURNS, context=0)
            else:
                assert bench.granted(look=False) == (looked == came)


class _opened:
    """A bench in a file of its own, for one example."""

    def __enter__(self) -> Bench:
        self._fd = os.memfd_create("page")
        self._page = Page.create(Path(f"/proc/self/fd/{self._fd}"), kv_total=1 << 20, device="d")
        self._page.publish("serving", IDLE)
        bench = Bench(self._page)
        assert bench.granted()
        return bench

    def __exit__(self, *_: object) -> None:
        self._page.close()
        os.close(self._fd)
