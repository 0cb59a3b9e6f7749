from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.bench import arrivals
from rose.bench.arrivals import Drawn, Fixed, LogNormal, parse_lengths, schedule

LAWS = [arrivals.poisson, arrivals.bursty, arrivals.gamma]
Law = Callable[[float, float, np.random.Generator], arrivals.Times]


@pytest.mark.parametrize("law", LAWS)
def test_mean_rate_is_kept_and_times_are_sorted(law: Law) -> None:
    counts = []
    for seed in range(20):
        times = law(5.0, 200.0, np.random.default_rng(seed))
        assert np.all(np.diff(times) >= 0)
        assert times.min() >= 0.0
        assert times.max() < 200.0
        counts.append(len(times) / 200.0)
    assert np.mean(counts) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("rate", [4.0, 10.0, 50.0])
@pytest.mark.parametrize("peak", [2.5, 4.0])
def test_busiest_second_of_bursts_is_about_peak_times_the_mean(rate: float, peak: float) -> None:
    ratios, means = [], []
    for seed in range(20):
        times = arrivals.bursty(rate, 300.0, np.random.default_rng(seed), peak)
        seconds = np.bincount(times.astype(int), minlength=300)
        ratios.append(seconds.max() / rate)
        means.append(seconds.mean())
    assert np.mean(ratios) == pytest.approx(peak, rel=0.15)
    assert np.mean(means) == pytest.approx(rate, rel=0.03)


def test_bursts_keep_the_mean_when_no_whole_cycle_fits() -> None:
    counts = [len(arrivals.bursty(20.0, 7.3, np.random.default_rng(s))) for s in range(200)]
    assert np.mean(counts) / 7.3 == pytest.approx(20.0, rel=0.03)


def test_bursts_that_leave_nothing_for_the_calm_are_refused() -> None:
    with pytest.raises(ValueError, match="lower peak"):
        arrivals.bursty(1000.0, 100.0, np.random.default_rng(0), peak=8.0)


def test_gamma_gaps_have_their_coefficient_of_variation() -> None:
    gaps = np.diff(arrivals.gamma(10.0, 3000.0, np.random.default_rng(1), cv=3.0))
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("law", LAWS)
def test_a_seed_fixes_the_schedule(law: Law) -> None:
    def make(seed: int) -> list[arrivals.Request]:
        rng = np.random.default_rng(seed)
        return schedule(law(5.0, 20.0, rng), LogNormal(100, 1.0, 400), Fixed(7), rng)

    assert make(3) == make(3)
    assert make(3) != make(4)


@given(st.floats(1, 500), st.floats(0, 3), st.integers(500, 2000))
def test_lognormal_lengths_stay_in_bounds(median: float, sigma: float, cap: int) -> None:
    drawn = LogNormal(median, sigma, cap).draw(50, np.random.default_rng(0))
    assert all(1 <= length <= cap for length in drawn)


def test_lengths_can_be_drawn_from_what_was_seen() -> None:
    assert set(Drawn([3, 9]).draw(100, np.random.default_rng(0))) == {3, 9}


def test_lengths_are_parsed() -> None:
    assert parse_lengths("128") == Fixed(128)
    assert parse_lengths("lognormal:128,0.8,1024") == LogNormal(128.0, 0.8, 1024)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "many", "lognormal:1", "zipf:2", "lognormal:9,1,3"]
)
def test_senseless_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no length"):
        parse_lengths(text)
