"""The measuring of our own cost: only our part of a step, only some steps, nothing left behind."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rose.executor.vllm.overhead import EVERY, Overhead

OURS_S, STOCK_S, WAITED_S = 0.002, 0.02, 0.01
LOOK_S = 0.0005
"""What one look at the clock takes."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> float:
        self.sleep(LOOK_S)
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.look)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


class Scheduler:
    def __init__(self) -> None:
        self.overhead = Overhead(self, lambda: WAITED_S)
        self.stock_schedule = self._schedule
        self.stock_update = self._update
        self.computed = 1

    def _schedule(self) -> Any:
        time.sleep(STOCK_S)
        return SimpleNamespace(total_num_scheduled_tokens=self.computed)

    def _update(self, output: Any) -> str:
        time.sleep(STOCK_S)
        return "outputs"

    def schedule(self) -> Any:
        time.sleep(OURS_S + WAITED_S)
        return self.stock_schedule()

    def update_from_output(self, output: Any) -> str:
        outputs = self.stock_update(output)
        time.sleep(OURS_S)
        self.overhead.stepped()
        return outputs


def run(scheduler: Scheduler) -> None:
    assert scheduler.update_from_output(scheduler.schedule()) == "outputs"


def test_only_our_own_part_is_counted_and_then_all_is_as_before() -> None:
    scheduler = Scheduler()
    plain = dict(vars(scheduler))
    for _ in range(2 * EVERY):
        run(scheduler)
    assert scheduler.overhead.microseconds == 0.0
    assert "schedule" in vars(scheduler)
    run(scheduler)
    assert scheduler.overhead.microseconds == pytest.approx(OURS_S * 2e6)
    assert vars(scheduler) == plain


def test_an_empty_step_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler()
    monkeypatch.setattr("rose.executor.vllm.overhead.EVERY", 1)
    for _ in range(3):
        run(scheduler)
    scheduler.computed = 0
    run(scheduler)
    assert scheduler.overhead.microseconds == 0.0
    scheduler.computed = 1
    run(scheduler)
    assert scheduler.overhead.microseconds > 0.0
