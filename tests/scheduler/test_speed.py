"""How fast an engine is taken to be."""

from __future__ import annotations

import pytest

from rose.scheduler.facts import Speed
from rose.scheduler.speed import Meter


def test_a_meter_finds_the_line_that_gaps_are_on() -> None:
    meter, line = Meter(Speed(0.1, 0.01)), Speed(0.02, 0.002)
    for turns in (1, 4, 9, 16) * 500:
        meter.gap(turns, line.token_s(turns))
    assert meter.speed.step_s == pytest.approx(line.step_s, rel=1e-3)
    assert meter.speed.turn_s == pytest.approx(line.turn_s, rel=1e-3)


def test_gaps_that_are_alike_count_one_by_one() -> None:
    together, apart = Meter(), Meter()
    for turns, seconds in ((3, 0.05), (7, 0.06), (2, 0.03)):
        together.gap(turns, seconds, times=5)
        for _ in range(5):
            apart.gap(turns, seconds)
    assert together.speed == apart.speed != Meter().speed
