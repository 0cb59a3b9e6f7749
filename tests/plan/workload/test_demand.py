import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.plan.workload.demand import Accept, Dapo, Demand, Grpo

STEPS = 200


def swings(demand: Demand, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [len(demand.useful(step, rng)) / demand.prompts for step in range(STEPS)]


def test_grpo_asks_for_the_same_in_every_step() -> None:
    assert set(swings(Grpo(16, 16), 0)) == {1.0}
    assert Grpo(16, 16).swing(7) == 1.0


@given(st.integers(1, 100), st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.integers(0, 400))
def test_dapo_replaces_what_is_of_no_use_and_never_asks_for_too_much(
    prompts: int, first: float, last: float, step: int
) -> None:
    demand = Dapo(prompts, 16, Accept(first, last, STEPS), most=6.0)
    useful = demand.useful(step, np.random.default_rng(step))
    assert np.array_equal(useful, demand.useful(step, np.random.default_rng(step)))
    assert prompts <= len(useful) <= 6 * prompts
    found = int(useful.sum())
    assert found == prompts or len(useful) == 6 * prompts
    if found == prompts:
        assert useful[-1]
        assert demand.allowed(found, len(useful) - found) == len(useful)


def test_a_group_begins_for_each_that_is_of_no_use() -> None:
    demand = Dapo(64, 16, Accept(0.5, 0.5))
    assert [demand.allowed(useful, useless) for useful, useless in ((0, 0), (9, 0), (9, 3))] == [
        64,
        64,
        67,
    ]


def test_refilling_keeps_so_many_running() -> None:
    demand = Dapo(64, 16, Accept(0.5, 0.5), additional=16)
    assert demand.allowed(0, 0) == 80
    assert demand.allowed(10, 7) - 17 == 80
    assert len(demand.useful(0, np.random.default_rng(0))) == 640


def test_all_groups_of_use_are_one_batch() -> None:
    assert len(Dapo(64, 16, Accept(1.0, 1.0)).useful(0, np.random.default_rng(0))) == 64


def test_the_share_kept_drifts_and_then_stays() -> None:
    accept = Accept(0.6, 0.2, 100)
    assert [accept.at(step) for step in (0, 50, 100, 300)] == pytest.approx([0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize("prompts", [16, 64])
def test_expected_swing_is_what_is_drawn(prompts: int) -> None:
    demand = Dapo(prompts, 16)
    drawn = np.mean([swings(demand, seed) for seed in range(20)], axis=0)
    expected = [demand.swing(step) for step in range(STEPS)]
    tens = [np.reshape(each, (-1, 10)).mean(axis=1) for each in (drawn, expected)]
    assert tens[0] == pytest.approx(tens[1], rel=0.05)


def test_demand_peaks_at_what_rose_reports() -> None:
    """ROSE: up to 5.7 times the base batch."""
    peaks = [max(swings(Dapo(64, 16), seed)) for seed in range(40)]
    assert np.median(peaks) == pytest.approx(5.7, rel=0.02)


@pytest.mark.parametrize(
    ("values", "name"),
    [((0.0, 0.5, 9), "first"), ((0.5, 1.1, 9), "last"), ((0.5, 0.5, 0), "steps")],
)
def test_senseless_shares_are_refused(values: tuple[float, float, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        Accept(*values)
