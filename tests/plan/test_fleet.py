"""A simulated fleet: no turn is lost, the same seed gives the same run, more devices help."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.simple import MODEL

from rose.bench.arrivals import Fixed, LogNormal
from rose.executor.admission import Terms
from rose.executor.slo import Slo
from rose.plan import training
from rose.plan.device import Device
from rose.plan.fleet import Fleet
from rose.plan.job import alone, at_load, simulate
from rose.plan.lending import Kind
from rose.plan.outcome import Outcome
from rose.plan.scenario import RlJob, Scenario, Serving
from rose.plan.sharing import Prompts, Sharing
from rose.plan.sync import Links
from rose.plan.systems import SYSTEMS
from rose.plan.validation.node import recorded_turns
from rose.plan.workload.demand import Accept, Dapo, Grpo
from rose.plan.workload.laws import Poisson, SquareBursts
from rose.plan.workload.quantiles import Quantiles
from rose.plan.workload.rollouts import Rollouts
from rose.plan.workload.serving import Sizes
from rose.plan.workload.traffic import Traffic

LAW = Rollouts(
    prompt=Fixed(100),
    turns=Quantiles(((0.1, 1), (0.5, 3), (0.99, 12))),
    output=LogNormal(30, 0.5, 200),
    observation=Fixed(10),
    tool_s=Quantiles(((0.5, 0.01), (0.99, 2.0))),
    alike=0.5,
    steady=0.3,
    context=4096,
)


def scenario(**more: Any) -> Scenario:
    serving = Serving(
        MODEL, Slo(0.6, 0.1), 0.5, Poisson(), Sizes(LogNormal(80, 0.5, 300), Fixed(8))
    )
    job = RlJob(MODEL, LAW, Grpo(4, 4), train_s=5.0, parameters=10_000_000)
    made = Scenario(
        "test", dedicated=1, lendable=3, trainers=1, tp=1, kv_bytes=20_000_000,
        serving=serving, job=job, links=Links(1e9, 1e9), steps=2, longest_s=400.0,
    )  # fmt: skip
    return replace(made, **more)


WAITING = sorted(name for name, system in SYSTEMS.items() if system.staleness is None)
"""Systems whose steps wait for all of their trajectories."""


@pytest.mark.parametrize("name", WAITING)
def test_every_system_ends_every_trajectory(name: str) -> None:
    found = simulate(scenario(), SYSTEMS[name])
    assert [step.trajectories for step in found.steps] == [16, 16]
    assert len(found.finished) == 32
    assert not np.isnan(found.finished).any()
    assert all(step.seconds >= step.rollout_s + 5.0 for step in found.steps)


def facts(found: Outcome) -> tuple[Any, ...]:
    return (found.steps, found.ttft.tolist(), found.tpot.tolist(), found.events, found.cuts,
            found.finished.tolist(), found.lent)  # fmt: skip


@pytest.mark.parametrize("name", ["rose", "rose_published", "spot"])
def test_the_same_seed_gives_the_same_run_bit_for_bit(name: str) -> None:
    first, again = (simulate(scenario(), SYSTEMS[name]) for _ in range(2))
    assert facts(first) == facts(again)
    other = simulate(scenario(seed=1), SYSTEMS[name])
    assert facts(first) != facts(other)


def test_all_systems_see_the_same_users_and_trajectories() -> None:
    found = [simulate(scenario(steps=1), SYSTEMS[name]) for name in ("rose", "share_all", "fixed")]
    assert len({outcome.steps[0].tokens for outcome in found}) == 1


def test_one_trajectory_on_one_device_takes_what_can_be_worked_out() -> None:
    law = replace(
        LAW, turns=Quantiles(((0.0, 3), (1.0, 3))), output=LogNormal(20, 0.0, 20),
        tool_s=Quantiles(((0.0, 1.0), (1.0, 1.0))),
    )  # fmt: skip
    job = replace(scenario().job, law=law, demand=Grpo(1, 1))
    found = simulate(scenario(job=job, lendable=0, steps=1), SYSTEMS["fixed"])
    prompts = 100 + 2 * (10 + 1)  # the last token of a turn is not in its KV before the next reads
    steps = 3 * (0.01 + 19 * 0.011)
    assert found.rollout_s == pytest.approx(steps + 0.0001 * prompts + 2.0, abs=0.01)


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from(WAITING), st.floats(0.1, 4.0))
def test_no_token_is_lost_whatever_is_taken_back(seed: int, name: str, rate: float) -> None:
    serving = replace(scenario().serving, rate=rate, law=SquareBursts(3.0))
    system = replace(SYSTEMS[name], revoked_per_s=0.2, away_s=1.0)
    found = simulate(scenario(seed=seed, serving=serving, steps=1), system)
    assert found.steps[0].tokens == found.made
    assert not np.isnan(found.finished).any()


def test_borrowing_helps_and_serving_alone_is_what_it_is_compared_with() -> None:
    many = scenario(job=replace(scenario().job, demand=Grpo(32, 8)))
    fixed, rose = (simulate(many, SYSTEMS[name]) for name in ("fixed", "rose"))
    assert rose.throughput > 1.2 * fixed.throughput
    assert fixed.attainment is None
    assert rose.harvest is not None and 0 < rose.harvest <= 1.2
    quiet = alone(scenario(), 300.0)
    assert quiet.attainment == 1.0
    assert quiet.p99("ttft") <= rose.p99("ttft")


def test_a_load_is_met() -> None:
    found = at_load(scenario(), 0.3)
    assert alone(replace(found, lendable=1), 400.0).busy == pytest.approx(0.3, abs=0.03)


def test_dapo_samples_more_and_asynchronous_steps_wait_less() -> None:
    base = scenario()
    dapo = replace(base, job=replace(base.job, demand=Dapo(4, 4, Accept(0.4, 0.4, 1))))
    found = simulate(dapo, SYSTEMS["fixed"])
    assert found.steps[0].trajectories > found.steps[0].trained == 16
    loose = replace(base, job=replace(base.job, staleness=1), steps=4)
    strict = replace(base, steps=4)
    fast, slow = (simulate(one, SYSTEMS["fixed"]).throughput for one in (loose, strict))
    assert fast > slow


def test_asynchronous_steps_learn_from_groups_of_use_only() -> None:
    job = replace(scenario().job, staleness=1)
    grpo, dapo, none = (
        simulate(scenario(job=replace(job, demand=demand), steps=10), SYSTEMS["fixed"])
        for demand in (
            Grpo(8, 4), Dapo(8, 4, Accept(0.4, 0.4, 1)), Dapo(8, 4, Accept(1.0, 1.0, 1))
        )
    )  # fmt: skip
    assert np.mean([step.batches for step in dapo.steps]) == pytest.approx(2.5, rel=0.25)
    assert dapo.throughput < 0.6 * grpo.throughput
    assert none.throughput == pytest.approx(grpo.throughput, rel=0.2)


def test_asynchronous_is_a_system_of_its_own() -> None:
    base = scenario(steps=4)
    loose = replace(base, job=replace(base.job, staleness=1))
    assert facts(simulate(base, SYSTEMS["fixed_async"])) == facts(
        simulate(loose, replace(SYSTEMS["fixed"], name="fixed_async"))
    )


def asynchronous(**more: Any) -> Outcome:
    job = replace(scenario().job, demand=Grpo(16, 8), **more)
    return simulate(scenario(job=job), SYSTEMS["fixed_async"])


def test_no_more_is_in_flight_than_memory_holds() -> None:
    fits, everything = asynchronous(), asynchronous(in_flight=math.inf)
    assert everything.prefix_hits < 0.1
    assert fits.prefix_hits > 0.7
    assert fits.throughput > everything.throughput


def test_what_is_in_flight_may_be_stated() -> None:
    assert asynchronous(in_flight=4).throughput < asynchronous(in_flight=16).throughput
    assert asynchronous(in_flight=1).prefix_hits > 0.7


SLOW_TOOLS = replace(LAW, tool_s=Quantiles(((0.5, 0.01), (0.95, 0.1), (1.0, 600.0))))
"""Most trajectories take seconds, some many minutes."""


def test_asynchronous_steps_count_when_long_trajectories_are_met_as_often_as_always() -> None:
    few, many = (
        [simulate(scenario(job=job, steps=steps, seed=seed), SYSTEMS["fixed_async"])
         for seed in range(4)]
        for job in [replace(scenario().job, law=SLOW_TOOLS, demand=Grpo(8, 4), in_flight=32)]
        for steps in (5, 60)
    )  # fmt: skip
    late = [step.seconds for found in many for step in found.steps[20:]]
    early = [step.seconds for found in few for step in found.steps]
    assert np.mean(early) == pytest.approx(np.mean(late), rel=0.15)
    assert all(found.steady for found in few)


def test_what_was_before_the_steps_that_count_is_not_counted() -> None:
    job = replace(scenario().job, law=SLOW_TOOLS, demand=Grpo(8, 4), staleness=1)
    found = simulate(scenario(job=job, longest_s=10_000.0), SYSTEMS["rose"])
    seconds = sum(step.seconds for step in found.steps)
    assert found.began_s > seconds
    assert found.lent_s <= 3 * (seconds + 1.0)
    assert len(found.ttft) == pytest.approx(3 * 0.5 * seconds, rel=0.3)
    assert 0.0 <= found.lent[0][0] <= found.lent[-1][0] <= seconds


def test_when_warming_up_takes_too_long_the_outcome_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "MOST_WARM", 100)
    job = replace(scenario().job, law=SLOW_TOOLS, demand=Grpo(8, 4))
    found = simulate(scenario(job=job), SYSTEMS["fixed_async"])
    assert not found.steady
    assert len(found.steps) == 2


def test_trainers_make_no_rollouts_while_they_train() -> None:
    job = replace(scenario().job, demand=Grpo(64, 8), staleness=1, train_s=60.0)
    found = simulate(scenario(job=job), SYSTEMS["hybrid"])
    given_back = [now for now, lent in found.lent if now and not lent]
    again = [now for now, lent in found.lent if lent]
    assert len(given_back) >= len(found.steps)
    for began in given_back:
        assert not any(began < now < began + job.train_s - 1.0 for now in again)


def test_places_make_waves() -> None:
    base = scenario(steps=1, lendable=0)
    base = replace(base, job=replace(base.job, demand=Grpo(16, 8)))
    few = replace(base, job=replace(base.job, places=2))
    none, waves = (simulate(one, SYSTEMS["fixed"]) for one in (base, few))
    assert waves.rollout_s > none.rollout_s
    assert waves.steps[0].tokens == none.steps[0].tokens == waves.made


def test_refilling_throws_away_what_runs_when_there_is_enough() -> None:
    base = scenario(steps=2)
    demand = Dapo(4, 4, Accept(0.5, 0.5, 1), additional=2)
    job = replace(base.job, demand=demand, places=8)
    found = simulate(replace(base, job=job), SYSTEMS["rose"])
    again = simulate(replace(base, job=job), SYSTEMS["rose"])
    assert facts(found) == facts(again)
    assert [step.trained for step in found.steps] == [16, 16]
    assert len(found.finished) < sum(step.trajectories for step in found.steps)
    assert not np.isnan(found.finished).any()


@pytest.mark.parametrize(("terms", "times"), [(Terms("rose", 0.001), 1), (Terms("share_all"), 2)])
def test_a_request_passes_the_host_before_its_engine_has_it(terms: Terms, times: int) -> None:
    """On the same cores: with nobody else there, or beside rollouts that do not give way."""
    known = Prompts((100, 100, 100, 100, 100), 100, 1.0)
    sharing = Sharing(terms, Slo(0.5, 0.1), MODEL, MODEL, known, credit_s=2.0)
    device = Device(0, serving=MODEL, rollout=MODEL, kv_total=10_000_000, sharing=sharing)
    device.wake()
    traffic = Traffic(np.array([0.5]), np.array([100]), np.array([2]), 1.0)
    fleet = Fleet([device], [traffic], Kind(front_s=0.05), np.random.default_rng(0))
    fleet.begin(recorded_turns([[(100, 500, 0.0)]]), 0)
    fleet.pass_time(1.0)
    assert fleet.users.served.arrival[0] == 0.5
    took = times * (0.05 + 0.02) + (terms.preempt_s or 0.0)
    assert fleet.users.served.ttft[0] == pytest.approx(took, abs=0.001)


def test_an_engine_that_starts_is_a_rival_of_serving_until_it_is_there() -> None:
    known = Prompts((100, 100, 100, 100, 100), 100, 1.0)
    sharing = Sharing(Terms("rose"), Slo(0.5, 0.1), MODEL, MODEL, known, credit_s=2.0)
    device = Device(0, serving=MODEL, rollout=MODEL, kv_total=10_000_000, sharing=sharing)
    traffic = Traffic(np.array([0.5, 4.5]), np.array([100, 100]), np.array([2, 2]), 5.0)
    fleet = Fleet([device], [traffic], Kind(), np.random.default_rng(0))
    fleet.host.start_engine(device, 4.0, 3.0)
    fleet.pass_time(5.0)
    assert list(fleet.users.served.ttft) == pytest.approx([1.75 * 0.02, 0.02])
