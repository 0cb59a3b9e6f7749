"""What a plan counts for money, and what it warns of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.test_fleet import scenario

from rose.plan.job import alone, simulate
from rose.plan.planner import Plan, usage
from rose.plan.systems import SYSTEMS
from rose.plan.workload.demand import Grpo


def test_headroom_is_paid_for_as_long_as_a_device_is_lent() -> None:
    job = replace(scenario().job, demand=Grpo(16, 8))
    many = scenario(job=job)
    quiet = alone(many, 100.0)
    used = usage(many, SYSTEMS["rose"], simulate(many, SYSTEMS["rose"]), quiet, trainers=0)
    assert used.headroom_gpu_s == pytest.approx(0.2 * used.borrowed_held_gpu_s)
    assert used.headroom_gpu_s > 0.0
    spot = usage(many, SYSTEMS["spot"], simulate(many, SYSTEMS["spot"]), quiet, trainers=0)
    assert spot.headroom_gpu_s == 0.0 < spot.borrowed_held_gpu_s


def test_a_plan_that_lasts_longer_than_its_users_says_so() -> None:
    long = scenario()
    short = replace(long, longest_s=5.0)
    for one, warned in ((long, 0), (short, 1)):
        outcomes = {name: simulate(one, SYSTEMS[name]) for name in ("fixed", "rose")}
        warnings = Plan(one, outcomes["fixed"], outcomes).warnings
        assert [word for word in warnings if "users are simulated for 5 s" in word] == warnings
        assert len(warnings) == warned
