from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.rl.environments.long_tail import (
    LONGEST_OBSERVATION,
    TOOL_SECONDS,
    TOOL_STEPS,
    LongTail,
    Table,
    quantile,
)
from rose.rl.types import Step

TABLES = [TOOL_STEPS, TOOL_SECONDS]


def play(seed: int, said: str = "yes", **options: float) -> tuple[list[Step], list[float]]:
    """The steps and how long tools took."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def go() -> list[Step]:
        env = LongTail(sleep=sleep, **options)
        env.reset(seed)
        steps = [await env.step(said)]
        while not steps[-1].done:
            steps.append(await env.step(said))
        return steps

    return asyncio.run(go()), slept


@pytest.mark.parametrize("table", TABLES)
def test_percentiles_are_met_exactly(table: Table) -> None:
    for share, value in table:
        assert quantile(table, share) == pytest.approx(value)


@given(st.sampled_from(TABLES), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_ascend_within_what_is_known(table: Table, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0.0 <= quantile(table, low) <= quantile(table, high) <= table[-1][1] * (1 + 1e-9)


def test_between_percentiles_the_logarithm_is_a_line() -> None:
    assert quantile(TOOL_SECONDS, 0.7) == pytest.approx((0.3 * 13.6) ** 0.5)
    assert quantile(TOOL_STEPS, 0.375) == pytest.approx(0.5)
    assert quantile(TOOL_STEPS, 0.1) == 0.0
    assert 0.0 < quantile(TOOL_SECONDS, 0.0) < 0.01


def test_many_draws_have_the_percentiles_of_the_source() -> None:
    rng = random.Random(0)
    for table in TABLES:
        drawn = [quantile(table, rng.random()) for _ in range(40_000)]
        for share, value in table:
            assert np.quantile(drawn, share) == pytest.approx(value, rel=0.1, abs=0.02)


def test_many_episodes_have_the_percentiles_of_the_source() -> None:
    plays = [play(seed) for seed in range(1500)]
    tools = [len(slept) for _, slept in plays]
    assert all(len(steps) == len(slept) + 1 for steps, slept in plays)
    assert np.quantile(tools, 0.25) == 0
    assert np.quantile(tools, 0.5) == 1
    assert np.quantile(tools, 0.9) == pytest.approx(20, rel=0.2)
    assert np.quantile(tools, 0.99) == pytest.approx(86, rel=0.2)
    seconds = [100 * one for _, slept in plays for one in slept]
    for share, value in TOOL_SECONDS:
        assert np.quantile(seconds, share) == pytest.approx(value, rel=0.15)


def test_a_seed_fixes_turns_latencies_and_words() -> None:
    long = max(range(50), key=lambda seed: len(play(seed)[1]))
    assert len(play(long)[1]) > 10
    assert play(long) == play(long)
    assert play(long)[1] != play(long + 1)[1]


def test_scales() -> None:
    long = max(range(50), key=lambda seed: len(play(seed)[1]))
    steps, slept = play(long)
    assert play(long, turn_scale=0.0) == ([Step("", 1.0, done=True)], [])
    assert len(play(long, turn_scale=0.5)[1]) == pytest.approx(len(slept) / 2, abs=1)
    assert play(long, time_scale=0.02)[1] == pytest.approx([2 * one for one in slept])
    assert play(long, time_scale=0.0) == (steps, [0.0] * len(slept))


def test_observations_are_short() -> None:
    for seed in range(50):
        steps, _ = play(seed)
        assert all(1 <= len(s.observation.split()) <= LONGEST_OBSERVATION for s in steps[:-1])


def test_the_reward_is_for_having_said_something_each_time() -> None:
    assert play(1)[0][-1].reward == 1.0
    assert play(1, said=" \n")[0][-1].reward == 0.0

    async def once_silent(seed: int) -> float:
        env = LongTail(time_scale=0.0)
        env.reset(seed)
        step = await env.step("")
        while not step.done:
            step = await env.step("yes")
        return step.reward

    long = max(range(50), key=lambda seed: len(play(seed)[1]))
    assert asyncio.run(once_silent(long)) == 0.0


def test_it_really_sleeps_by_default() -> None:
    seed = next(seed for seed in range(100) if 3 < len(play(seed)[1]) < 10)

    async def go() -> float:
        env, loop = LongTail(time_scale=1e-3), asyncio.get_running_loop()
        env.reset(seed)
        began = loop.time()
        while not (await env.step("yes")).done:
            pass
        return loop.time() - began

    assert asyncio.run(go()) >= sum(play(seed, time_scale=1e-3)[1]) * 0.9


def test_negative_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="time_scale"):
        LongTail(time_scale=-1.0)
    with pytest.raises(ValueError, match="turn_scale"):
        LongTail(turn_scale=float("nan"))
