from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.plan.money import (
    Line,
    Prices,
    Usage,
    cost_per_correct,
    cost_per_correct_counted,
    cost_per_step,
    opportunistic_parts,
    opportunity_cost,
)

HOURS = 3600.0
STEP = Usage(
    dedicated_gpu_s=8 * HOURS,
    borrowed_used_gpu_s=6 * HOURS,
    borrowed_held_gpu_s=16 * HOURS,
    wan_bytes=250e6,
    headroom_gpu_s=0.1 * HOURS,
    wall_s=1.0 * HOURS,
    extra_violations=3,
    requests=20_000,
    correct=100,
)
ROUND = Prices(3.0, 4.0, 0.05, 0.02, 0.2, 0.01)


def test_the_three_lines_by_hand() -> None:
    lines = cost_per_step(STEP, ROUND)
    own = 8 * 3.0
    assert lines[Line.DEDICATED] == pytest.approx(own + 6 * 3.0)
    assert lines[Line.SERVING] == pytest.approx(own + 16 * 4.0 + 0.005 + 0.2)
    assert lines[Line.OPPORTUNISTIC] == pytest.approx(
        own + 6 * 4.0 * 0.05 + 0.005 + 0.1 * 4.0 * 0.05 + 0.2 + 3 * 0.01
    )
    assert sum(opportunistic_parts(STEP, ROUND).values()) == lines[Line.OPPORTUNISTIC]
    assert lines[Line.OPPORTUNISTIC] < lines[Line.DEDICATED] < lines[Line.SERVING]


def test_penalties_can_make_borrowing_the_dearest() -> None:
    dear = replace(ROUND, penalty_per_violation=1)
    lines = cost_per_step(replace(STEP, extra_violations=10_000), dear)
    assert max(lines, key=lambda line: lines[line]) is Line.OPPORTUNISTIC


def test_opportunity_cost_is_expected_penalties() -> None:
    assert opportunity_cost(0.002, 5000, 0.01) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="penalty is -1; it must be a number from 0 up"):
        opportunity_cost(0.1, 10, -1)


def test_cost_per_correct_is_the_formula() -> None:
    assert cost_per_correct(0.02, 3.0, 0.5, 0.25) == pytest.approx(0.02 * 3.0 * 1.5 / 0.25)


@given(
    st.floats(0, 100), st.floats(0, 100), st.floats(0, 10), st.floats(0.01, 1), st.floats(0.01, 1)
)
def test_a_stricter_verifier_makes_answers_dearer(
    price: float, multiplier: float, ratio: float, one: float, other: float
) -> None:
    strict, easy = sorted((one, other))
    assert cost_per_correct(price, multiplier, ratio, strict) >= cost_per_correct(
        price, multiplier, ratio, easy
    )


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, math.nan])
def test_an_impossible_accept_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"accept_rate is .*above 0 and at most 1\.$"):
        cost_per_correct(1, 1, 0, rate)


def test_counted_answers() -> None:
    costs = cost_per_step(STEP, ROUND)
    counted = cost_per_correct_counted(STEP, ROUND)
    assert counted == {line: pytest.approx(cost / 100) for line, cost in costs.items()}
    nothing = cost_per_correct_counted(replace(STEP, correct=0), ROUND)
    assert set(nothing.values()) == {math.inf}


def test_impossible_usage_and_prices_are_refused() -> None:
    with pytest.raises(ValueError, match="wan_bytes is -1"):
        replace(STEP, wan_bytes=-1)
    with pytest.raises(ValueError, match="3 serving requests cannot be late of 2"):
        replace(STEP, requests=2)
    with pytest.raises(ValueError, match=r"wan_per_gb is -0\.02"):
        Prices(wan_per_gb=-0.02)
    assert cost_per_step(replace(STEP, requests=0, extra_violations=0), ROUND)
