import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.plan.workload.quantiles import Quantiles
from rose.rl.environments import long_tail


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
@pytest.mark.parametrize("table", [long_tail.TOOL_STEPS, long_tail.TOOL_SECONDS])
def test_reads_tables_as_the_environment_does(table: long_tail.Table, shares: list[float]) -> None:
    expected = [long_tail.quantile(table, share) for share in shares]
    assert Quantiles(tuple(table)).at(np.asarray(shares)) == pytest.approx(expected, rel=1e-9)


def test_draws_have_the_percentiles_given() -> None:
    law = Quantiles(((0.1, 20), (0.5, 100), (0.9, 5000), (1, 9000)))
    drawn = law.array(100_000, np.random.default_rng(0))
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx([20, 100, 5000], rel=0.05)
    assert drawn.min() >= 1
    assert drawn.max() <= 9000


def test_lengths_are_at_least_one() -> None:
    assert set(Quantiles(((0, 0), (1, 0.4))).draw(100, np.random.default_rng(0))) == {1}


@pytest.mark.parametrize(
    "rows",
    [((0.5, 1.0),), ((0.5, 1.0), (0.5, 2.0)), ((0.1, 1.0), (1.2, 2.0)), ((0.1, 3.0), (0.2, 1.0))],
)
def test_senseless_tables_are_refused(rows: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"shares|values"):
        Quantiles(rows)
