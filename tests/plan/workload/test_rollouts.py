from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.bench.arrivals import Fixed, LogNormal
from rose.plan.workload.presets import AGENTIC, ALFWORLD, FROZEN_LAKE, ROLLOUTS
from rose.plan.workload.quantiles import Quantiles
from rose.plan.workload.rollouts import Rollouts, Trajectories, make_rollouts, tail_share

LAW = Rollouts(
    prompt=LogNormal(50, 0.5, 400),
    turns=Quantiles(((0.5, 3), (1, 30))),
    output=LogNormal(40, 1.0, 300),
    observation=LogNormal(20, 1.0, 200),
    tool_s=Quantiles(((0.5, 0.1), (0.9, 5.0), (0.99, 100.0))),
    alike=0.5,
    steady=0.5,
    context=1000,
)
ARRAYS = ("group", "prompt", "offset", "output", "observation", "tool_s")


@given(
    st.integers(1, 30), st.integers(1, 16), st.integers(2, 3000), st.floats(0, 1), st.floats(0, 1)
)
def test_every_turn_belongs_to_one_trajectory_and_fits(
    prompts: int, samples: int, context: int, alike: float, steady: float
) -> None:
    law = replace(LAW, context=context, alike=alike, steady=steady)
    made = make_rollouts(law, prompts, samples, seed=prompts)
    assert len(made) == len(made.group) == prompts * samples
    assert made.group.tolist() == sorted(list(range(prompts)) * samples)
    assert made.offset[0] == 0
    assert made.offset[-1] == len(made.output) == len(made.observation) == len(made.tool_s)
    assert made.turns.min() >= 1
    assert made.turns.max() <= 30
    assert made.tokens.max() <= context
    assert made.output.min() >= 1
    assert made.output.max() <= 300
    last = made.offset[1:] - 1
    assert not made.observation[last].any()
    assert not made.tool_s[last].any()
    between = np.setdiff1d(np.arange(len(made.output)), last)
    assert np.all(made.observation[between] >= 1)
    for group in range(prompts):
        assert len(set(made.prompt[made.group == group])) == 1


@pytest.mark.parametrize("law", ROLLOUTS.values(), ids=list(ROLLOUTS))
def test_a_seed_fixes_every_bit(law: Rollouts) -> None:
    def bits(seed: int) -> list[bytes]:
        made = make_rollouts(law, 8, 16, seed)
        return [getattr(made, name).tobytes() for name in ARRAYS]

    assert bits(1) == bits(1)
    assert bits(1) != bits(2)


def test_what_samples_of_a_prompt_share() -> None:
    def correlation(alike: float) -> float:
        pairs = make_rollouts(replace(LAW, alike=alike), 4000, 2, seed=0).turns.reshape(-1, 2)
        return float(np.corrcoef(np.log(pairs).T)[0, 1])

    assert correlation(0.0) == pytest.approx(0.0, abs=0.05)
    assert 0.4 < correlation(0.6) < 0.65
    assert correlation(1.0) > 0.85  # the rest is the context that cuts


def test_durations_add_up() -> None:
    made = Trajectories(
        group=np.array([0, 0]),
        prompt=np.array([10, 10]),
        offset=np.array([0, 2, 3]),
        output=np.array([100, 200, 50]),
        observation=np.array([30, 0, 0]),
        tool_s=np.array([4.0, 0.0, 0.0]),
    )
    assert made.turns.tolist() == [2, 1]
    assert made.tokens.tolist() == [340, 60]
    assert made.durations(0.1) == pytest.approx([34.0, 5.0])
    assert made.durations(0.1, 0.01) == pytest.approx([34.4, 5.1])


def test_tail_share_counts_who_is_done_early() -> None:
    assert tail_share(np.array([1.0, 2.0, 3.0, 10.0])) == 0.75
    assert tail_share(np.array([1.0, 2.0, 3.0, 10.0]), part=0.25) == 0.5


@pytest.mark.parametrize(
    ("law", "prompts", "token_s"), [(FROZEN_LAKE, 16, 0.025), (ALFWORLD, 64, 0.045)]
)
def test_three_quarters_finish_in_the_first_third_as_rose_reports(
    law: Rollouts, prompts: int, token_s: float
) -> None:
    """ROSE: 75 % of the trajectories within the first 30 % of the rollout."""
    shares = [
        tail_share(make_rollouts(law, prompts, 16, seed).durations(token_s)) for seed in range(20)
    ]
    assert np.median(shares) == pytest.approx(0.75, abs=0.05)


def test_agents_have_the_tables_percentiles() -> None:
    made = make_rollouts(replace(AGENTIC, context=10**9), 4096, 8, seed=0)
    steps = made.turns - 1
    assert np.quantile(steps, [0.25, 0.5, 0.9, 0.99]) == pytest.approx([0, 1, 20, 86], rel=0.1)
    assert steps.mean() == pytest.approx(7.8, rel=0.1)
    tools = np.delete(made.tool_s, made.offset[1:] - 1)
    assert np.quantile(tools, [0.5, 0.9, 0.99]) == pytest.approx([0.1, 10.0, 192.0], rel=0.1)
    assert tools.mean() == pytest.approx(16.8, rel=0.1)
    assert np.quantile(made.output, [0.5, 0.9, 0.99]) == pytest.approx([214, 822, 3175], rel=0.15)


def test_65536_trajectories_are_made() -> None:
    made = make_rollouts(AGENTIC, 4096, 16, seed=0)
    assert len(made) == 65_536
    assert made.turns.sum() == len(made.tool_s) > 300_000


@pytest.mark.parametrize(("name", "value"), [("alike", 1.5), ("steady", -0.1), ("context", 1)])
def test_senseless_laws_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        replace(LAW, **{name: value})


def test_no_trajectories_are_refused() -> None:
    with pytest.raises(ValueError, match="prompts is 0"):
        make_rollouts(replace(LAW, prompt=Fixed(3)), 0, 4, seed=0)


def test_a_turns_context_is_all_that_came_before_and_what_it_made() -> None:
    made = Trajectories(
        group=np.array([0, 0]),
        prompt=np.array([100, 100]),
        offset=np.array([0, 2, 3]),
        output=np.array([10, 20, 30]),
        observation=np.array([5, 0, 0]),
        tool_s=np.zeros(3),
    )
    assert made.contexts.tolist() == [110, 135, 130]


def test_a_trajectory_in_flight_is_likely_a_long_one() -> None:
    alike = replace(
        LAW, prompt=Fixed(100), turns=Quantiles(((0.0, 2), (1.0, 2))),
        output=LogNormal(20, 0.0, 20), observation=Fixed(10),
    )  # fmt: skip
    assert alike.context_in_flight() == pytest.approx((120 + 150) / 2)
    few_are_long = replace(alike, turns=Quantiles(((0.0, 1), (0.9, 1), (1.0, 20))))
    drawn = make_rollouts(few_are_long, 5000, 1, seed=0)
    assert few_are_long.context_in_flight() > 1.2 * drawn.tokens.mean()
