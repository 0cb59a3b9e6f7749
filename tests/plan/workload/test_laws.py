import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.plan.workload.laws import (
    DAY_S,
    Copied,
    Diurnal,
    GammaBursts,
    Law,
    Noisy,
    Poisson,
    SquareBursts,
)
from rose.plan.workload.recorded import RateCurve, Recorded
from rose.plan.workload.traffic import Traffic

RECORD = Traffic(
    np.array([0.0, 0.1, 0.2, 3.0, 7.0]), np.arange(1, 6), np.arange(11, 16), duration_s=8.0
)
LAWS: list[Law] = [
    Poisson(),
    GammaBursts(3.0),
    SquareBursts(),
    Noisy(0.8, 5.0),
    Diurnal(0.5, 2.0, period_s=60.0),
    Diurnal(0.5, 2.0, base=Noisy(0.5, 10.0, GammaBursts(2.0))),
    Copied(GammaBursts(3.0), own_rate=1.3),
    Recorded(RECORD),
    RateCurve(np.array([0.0, 7.0, 9.0]), np.array([1.0, 0.0, 5.0]), start_s=4.0),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
@pytest.mark.parametrize("rate", [0.4, 5.0])
def test_times_are_sorted_within_the_run_and_have_the_mean_rate(law: Law, rate: float) -> None:
    counts = []
    for seed in range(40):
        times = law.times(rate, 200.0, np.random.default_rng(seed))
        assert np.all(np.diff(times) >= 0.0)
        assert np.all((times >= 0.0) & (times < 200.0))
        counts.append(len(times))
    spread = np.std(counts) / np.sqrt(len(counts))
    assert np.mean(counts) == pytest.approx(rate * 200.0, abs=4.0 * spread + 1e-9)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_a_seed_fixes_every_bit(law: Law) -> None:
    def times(seed: int) -> bytes:
        return law.times(5.0, 300.0, np.random.default_rng(seed)).tobytes()

    assert times(3) == times(3)
    assert times(3) != times(4)


@given(st.floats(0.01, 1e5), st.floats(0.1, 1e5), st.integers(0, 99))
def test_any_rate_and_duration_fit(rate: float, duration: float, seed: int) -> None:
    rate = min(rate, 1e4 / duration)
    for law in (Diurnal(0.0, 1.0), Noisy(2.0, 1.0), LAWS[-1], LAWS[-2]):
        times = law.times(rate, duration, np.random.default_rng(seed))
        assert np.all(np.diff(times) >= 0.0)
        assert np.all((times >= 0.0) & (times < duration))


def test_a_day_has_its_trough_and_its_peak() -> None:
    times = Diurnal(0.5, 1.5).times(20.0, DAY_S, np.random.default_rng(0))
    hours = np.histogram(times, 24, (0.0, DAY_S))[0] / (20.0 * 3600.0)
    assert hours[[0, -1]] == pytest.approx([0.5, 0.5], abs=0.03)
    assert hours[[11, 12]] == pytest.approx([1.5, 1.5], abs=0.03)
    begins_high = Diurnal(0.5, 1.5, start_s=DAY_S / 2).times(20.0, DAY_S, np.random.default_rng(0))
    assert np.mean(begins_high < 3600.0) > 0.05


def test_noise_has_its_spread_and_memory() -> None:
    times = Noisy(0.5, 40.0).times(100.0, 40_000.0, np.random.default_rng(0))
    counts = np.histogram(times, 8_000, (0.0, 40_000.0))[0]
    rates = counts / counts.mean() - 1.0
    variance = rates.var() - 1.0 / counts.mean()
    assert variance == pytest.approx(np.exp(0.25) - 1.0, rel=0.15)
    later = np.mean(rates[:-8] * rates[8:])
    assert later / variance == pytest.approx(np.exp(-1.0), abs=0.1)


def test_dealt_copies_keep_the_clumps_that_dealing_thins_out() -> None:
    def dispersion(law: Law) -> float:
        rng = np.random.default_rng(5)
        times = law.times(200.0, 2_000.0, rng)
        mine = times[rng.integers(50, size=len(times)) == 0]
        counts = np.histogram(mine, 200, (0.0, 2_000.0))[0]
        return float(counts.var() / counts.mean())

    assert dispersion(GammaBursts(4.0)) < 2.0
    assert dispersion(Copied(GammaBursts(4.0), own_rate=4.0)) > 5.0


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (-1.0, 1.0), (0.0, 0.0)])
def test_senseless_days_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low is"):
        Diurnal(low, high)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rate is 0"):
        RateCurve(np.array([0.0, 5.0]), np.zeros(2)).times(1.0, 10.0, np.random.default_rng(0))
