"""What a plan counts for money."""

from __future__ import annotations

import pytest
from tests.plan.test_fleet import scenario

from rose.plan.job import alone, simulate
from rose.plan.planner import usage
from rose.plan.systems import SYSTEMS


def test_headroom_is_paid_for_as_long_as_a_device_is_lent() -> None:
    lent = simulate(scenario(), SYSTEMS["rose"])
    quiet = alone(scenario(), 100.0)
    used = usage(scenario(), SYSTEMS["rose"], lent, quiet, trainers=0)
    assert used.headroom_gpu_s == pytest.approx(0.2 * used.borrowed_held_gpu_s)
    assert used.headroom_gpu_s > 0.0
    spot = simulate(scenario(), SYSTEMS["spot"])
    assert usage(scenario(), SYSTEMS["spot"], spot, quiet, trainers=0).headroom_gpu_s == 0.0
