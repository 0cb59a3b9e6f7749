"""Serving's users who come back, and what lending must not cost them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.test_fleet import scenario

from rose.plan.engine import Job
from rose.plan.job import alone, simulate
from rose.plan.outcome import Outcome
from rose.plan.returning import Returning, Visits, visits
from rose.plan.systems import SYSTEMS
from rose.plan.workload.demand import Grpo
from rose.plan.workload.traffic import Traffic


def traffic(count: int, rate: float = 1.0) -> Traffic:
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0.0, count / rate, count))
    return Traffic(times, rng.integers(100, 2000, count), np.full(count, 10), count / rate)


@settings(max_examples=30)
@given(st.floats(0.05, 0.99), st.floats(1.0, 300.0), st.integers(0, 99))
def test_everybody_goes_on_from_an_earlier_request_that_nobody_else_does(
    hit_rate: float, return_s: float, seed: int
) -> None:
    users = traffic(300)
    found = visits(users, hit_rate, return_s, np.random.default_rng(seed))
    back = [(i, before) for i, before in enumerate(found.after) if before >= 0]
    assert all(before < i or before >= 300 for i, before in back)
    assert len({before for _, before in back}) == len(back)
    assert len(found.past) == sum(before >= 300 for _, before in back)
    assert all(since <= 0.0 for since, _ in found.past)
    assert len(back) / 300 * found.share == pytest.approx(hit_rate, abs=0.15)


def test_a_return_takes_as_long_as_told() -> None:
    users = traffic(4000)
    after = visits(users, 0.4, 30.0, np.random.default_rng(0)).after
    gaps = [users.arrival_s[i] - users.arrival_s[b] for i, b in enumerate(after) if 0 <= b < 4000]
    assert np.mean(gaps) == pytest.approx(30.0, rel=0.2)


def test_who_comes_back_computes_what_is_new_unless_its_memory_was_wanted() -> None:
    for room, left in ((4096, 100), (0, 1000)):
        one = Returning(Visits([-1, 0], 0.9, []), 100_000)
        first = Job(7, 1000, 1000, 24)
        assert one.begin(first, 0.0) == first
        one.end(first, 1.0)
        one.fit(room)
        assert one.begin(Job(8, 1000, 1000, 24), 5.0) == Job(8, left, 1000, 24)
        assert (one.tokens, one.hits, one.lost) == (2000, 1000 - left, left - 100)


def test_who_comes_back_to_a_request_that_runs_shares_its_blocks() -> None:
    one = Returning(Visits([-1, 0], 0.9, []), 100_000)
    one.begin(Job(7, 1000, 1000, 24), 0.0)
    assert one.begin(Job(8, 1000, 1000, 24), 0.5).prompt == 100
    assert one.lost == 0


def test_what_users_come_back_to_is_warm() -> None:
    one = Returning(Visits([-1, 0, -1], 0.9, []), 10_000)
    assert one.warm(0.0) == 0
    job = Job(7, 1000, 1000, 24)
    one.begin(job, 0.0)
    one.end(job, 1.0)
    assert one.warm(10.0) == pytest.approx(1024, rel=0.01)  # nobody has had time to come back
    assert one.warm(2000.0) == 0


def small(prefix_loss: float) -> Outcome:
    """Rollouts that want more memory than there is."""
    base = scenario(job=replace(scenario().job, demand=Grpo(32, 8)), kv_bytes=8_000_000)
    serving = replace(
        base.serving, rate=2.0, prefix_hit_rate=0.6, prefix_return_s=20.0, prefix_loss=prefix_loss
    )
    return simulate(replace(base, serving=serving), SYSTEMS["rose"])


def test_lending_costs_hits_and_first_tokens_if_prefixes_do_not_count_as_need() -> None:
    kept, taken = small(0.02), small(1.0)
    assert kept.hit_rate is not None and taken.hit_rate is not None
    assert kept.hit_rate_alone == pytest.approx(0.6, abs=0.05)
    assert kept.lost <= 0.02 * (kept.found + kept.lost)
    assert taken.lost > 0.3 * (taken.found + taken.lost)
    assert kept.hit_rate > taken.hit_rate + 0.2
    assert np.mean(kept.ttft) < 0.9 * np.mean(taken.ttft)
    assert kept.throughput < taken.throughput  # what it costs the job


def test_serving_alone_finds_what_it_is_told_to() -> None:
    base = scenario()
    serving = replace(base.serving, rate=2.0, prefix_hit_rate=0.4, prefix_return_s=20.0)
    quiet, none = (alone(replace(base, serving=one), 400.0) for one in (serving, base.serving))
    assert quiet.hit_rate == quiet.hit_rate_alone == pytest.approx(0.4, abs=0.05)
    assert none.hit_rate is None and none.hit_rate_alone is None
