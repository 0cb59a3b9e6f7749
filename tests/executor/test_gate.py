"""The gate between serving's facts and the rollout engine's steps.

What shuts it because it cannot be seen or is not known is in `test_gate_unseen`."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.executor.admission import Refusal, Terms
from rose.executor.facts import ServingFacts
from rose.executor.gate import Gate
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.page import Page

CHUNK = 64
CONTEXT = 0
IDLE = ServingFacts(ttft_s=1.0, tpot_s=0.5, clear_with_new_s=0.2, next_step_with_new_s=0.2)


class Bench:
    """A page that serving writes, and a gate that reads it."""

    def __init__(self, folder: Path) -> None:
        self.page = Page.create(folder / "page", kv_total=1 << 20, device="cpu:0")
        profile = Profile("m", "d", 0.01, 0.001, 0.002, 0.0, margin=1.25, error=0.0)
        self.gate = self.make(Tracker(profile), dedicated=False)
        self.terms = Terms()

    def make(self, latency: Tracker, *, dedicated: bool) -> Gate:
        return Gate(self.page, latency, time.monotonic, dedicated=dedicated, chunk=CHUNK)

    def serving(self, **facts: float) -> None:
        now = time.monotonic()
        self.page.publish("serving", msgspec.structs.replace(IDLE, written=now, **facts))

    def busy(self, slack: float) -> None:
        """One request that decodes, whose next token may wait so long."""
        now = time.monotonic()
        self.serving(
            running=1,
            decode_deadline=now + 30.0 + slack + 0.2,
            step_began=now,
            step_ends=now + 30.0,
            ttft_s=100.0,
        )

    def decide(self, active: bool = True) -> None:
        self.gate.decide(self.terms, active=active, turns=4, context=CONTEXT)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_facts_that_come_while_they_are_read_open_the_gate(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = bench.page._read

    def meanwhile(section: str) -> Any:
        bench.serving()
        return read(section)

    monkeypatch.setattr(bench.page, "_read", meanwhile)
    bench.decide()
    assert step(bench)


def step(bench: Bench, decode: int = 4) -> int:
    """As the engine does."""
    tokens = bench.gate.tokens(decode)
    if tokens:
        bench.gate.begun += 1
    return tokens


def end(bench: Bench) -> None:
    now = time.monotonic()
    bench.gate.end(bench.gate.used, Step(0, 4, 0), now, now)


def test_it_is_shut_until_somebody_decides_and_for_engines_that_are_not_active(
    bench: Bench,
) -> None:
    bench.serving()
    assert step(bench) == 0
    bench.decide(active=False)
    assert step(bench) == 0
    assert bench.gate.refused == {Refusal.STATE: 2}


def test_an_idle_serving_engine_leaves_it_open_for_many_steps(bench: Bench) -> None:
    bench.serving()
    bench.decide()
    assert [step(bench) for _ in range(3)] == [4 + CHUNK] * 3
    assert not bench.gate.watchful


def test_a_batch_too_large_for_an_idle_device_runs_in_part(bench: Bench) -> None:
    bench.serving(ttft_s=0.2 + 0.1)  # room for 0.1 s: 0.0125 s fixed, 0.0025 s a turn
    bench.decide()
    assert step(bench, decode=100) == 34
    bench.serving(ttft_s=0.2 + 0.01)
    bench.decide()
    assert step(bench, decode=100) == 0


def test_slack_of_a_busy_one_is_lent_once(bench: Bench) -> None:
    bench.busy(slack=0.3)
    bench.decide()
    assert bench.gate.watchful
    assert step(bench) > 4
    assert step(bench) == 0
    bench.decide()
    assert step(bench) == 0  # the first step has not ended: what it takes of the slack is unknown
    end(bench)
    bench.decide()
    assert step(bench) > 4


def test_slack_is_not_lent_when_serving_was_idle_just_now(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.serving()
    bench.decide()
    bench.busy(slack=0.3)
    bench.decide()
    assert step(bench) == 0
    for patience in ("PATIENCE", "BURST"):
        assert step(bench) == 0
        monkeypatch.setattr(f"rose.executor.admission.{patience}", 0.0)
        bench.decide()
    assert step(bench) > 4


def test_slack_too_short_for_all_turns_is_not_worth_a_step(bench: Bench) -> None:
    bench.busy(slack=0.02)
    bench.decide()
    assert step(bench, decode=1) == 0
    assert bench.gate.refused == {Refusal.DECODE: 1}


def test_a_dedicated_device_asks_nobody(bench: Bench) -> None:
    profile = Profile("m", "d", 0.01, 0.001, 0.002, 0.0, margin=1.25, error=0.0)
    bench.gate = bench.make(Tracker(profile), dedicated=True)
    bench.decide()
    assert step(bench) == 4 + CHUNK


def test_an_engine_that_waits_goes_on_as_soon_as_it_opens(bench: Bench) -> None:
    bench.busy(slack=0.0)
    bench.decide()
    got: list[int] = []

    def engine() -> None:
        for _ in range(1000):
            if tokens := step(bench):
                got.append(tokens)
                return

    waiting = threading.Thread(target=engine)
    waiting.start()
    bench.serving()
    bench.decide()
    waiting.join(20.0)
    assert got == [4 + CHUNK]


def test_risky_steps_are_paid_from_the_error_budget(bench: Bench) -> None:
    bench.terms = Terms(error_budget=0.002)
    tight = {"clear_with_new_s": 0.99, "clear_new_98_s": 0.99, "arrival_rate": 1.0}
    bench.serving(arrived=0, **tight)
    bench.decide()
    assert step(bench) == 0  # next to nothing earned yet
    bench.serving(arrived=200, **tight)
    bench.decide()
    assert step(bench) > 0
    assert bench.gate.risk == 0.0
    end(bench)
    assert bench.gate.risk > 0.0
