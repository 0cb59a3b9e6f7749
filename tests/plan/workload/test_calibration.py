"""The shipped laws against the traces they were fitted to.

A single run of a slow swing may look calm or wild by chance, so dispersions are medians over seeds
of runs as long as the trace.
"""

from pathlib import Path

import numpy as np
import pytest

from rose.bench import rates
from rose.bench.arrivals import Times
from rose.plan.workload.laws import DAY_S
from rose.plan.workload.presets import SERVEGEN_DAYS, SERVICES
from rose.plan.workload.recorded import Recorded
from rose.plan.workload.serving import make_traffic
from rose.plan.workload.traffic import Traffic

FILES = {"azure_chat": "azure_2023_conv.csv.gz", "servegen_large": "servegen_m_large_2h.csv.gz"}
WINDOWS_S = (1, 10, 60)
SEEDS = range(40)
WITHIN = 0.25
PEAK_WITHIN = 0.35
"""The busiest window is one draw from the far tail."""


def counts(times: Times, duration: float, window: float) -> Times:
    """Requests in every whole window."""
    whole = int(duration / window)
    return np.histogram(times, whole, (0.0, whole * window))[0].astype(np.float64)


def dispersion(times: Times, duration: float, window: float) -> float:
    """Variance of the count over its mean: 1 for Poisson."""
    seen = counts(times, duration, window)
    return float(seen.var() / seen.mean())


def peak(times: Times, duration: float, window: float) -> float:
    seen = counts(times, duration, window)
    return float(seen.max() / seen.mean())


@pytest.fixture(scope="module", params=FILES)
def pair(request: pytest.FixtureRequest, traces: Path) -> tuple[Traffic, list[Traffic]]:
    """A trace, and runs of its law as long as it."""
    trace = Recorded.read(traces / FILES[request.param]).traffic
    service = SERVICES[request.param]
    assert trace.rate == pytest.approx(service.rate, rel=0.01)
    length = trace.duration_s
    runs = [make_traffic(service.law, service.sizes, service.rate, length, s) for s in SEEDS]
    return trace, runs


@pytest.mark.parametrize("window", WINDOWS_S)
def test_dispersion_of_the_rate(pair: tuple[Traffic, list[Traffic]], window: int) -> None:
    trace, runs = pair
    expected = dispersion(trace.arrival_s, trace.duration_s, window)
    found = [dispersion(run.arrival_s, trace.duration_s, window) for run in runs]
    assert np.median(found) == pytest.approx(expected, rel=WITHIN)


@pytest.mark.parametrize("window", WINDOWS_S)
def test_busiest_window(pair: tuple[Traffic, list[Traffic]], window: int) -> None:
    trace, runs = pair
    expected = peak(trace.arrival_s, trace.duration_s, window)
    found = [peak(run.arrival_s, trace.duration_s, window) for run in runs]
    assert np.median(found) == pytest.approx(expected, rel=PEAK_WITHIN)


@pytest.mark.parametrize("lengths", ["prompt", "output"])
def test_lengths(pair: tuple[Traffic, list[Traffic]], lengths: str) -> None:
    trace, runs = pair
    shares = (0.5, 0.9, 0.99)
    found = np.quantile(np.concatenate([getattr(run, lengths) for run in runs]), shares)
    assert found == pytest.approx(np.quantile(getattr(trace, lengths), shares), rel=WITHIN)


def hours(rate: Times) -> Times:
    """Mean of each hour of the day over that of all, from windows of ten minutes."""
    profile: Times = rate.reshape(-1, 24, 6).mean(axis=(0, 2)) / rate.mean()
    return profile


def strongest_period_h(rate: Times) -> float:
    """Between half a day and two days, of 14 days in windows of ten minutes."""
    waves = np.abs(np.fft.rfft(rate - rate.mean()))
    first, last = 7, 28
    return 14 * 24 / (first + int(np.argmax(waves[first : last + 1])))


def test_days_have_their_trough_peak_and_period(traces: Path) -> None:
    recorded = rates.load(traces / "servegen_rates_14d.csv.gz").column("m_small")
    duration = 14 * DAY_S
    runs = [
        counts(SERVEGEN_DAYS.times(1.0, duration, np.random.default_rng(seed)), duration, 600.0)
        for seed in range(10)
    ]
    low, high = (np.median([f(hours(run)) for run in runs]) for f in (np.min, np.max))
    assert low == pytest.approx(hours(recorded).min(), rel=0.15)
    assert high == pytest.approx(hours(recorded).max(), rel=0.15)
    spreads = [run.std() / run.mean() for run in runs]
    assert np.median(spreads) == pytest.approx(recorded.std() / recorded.mean(), rel=WITHIN)
    assert strongest_period_h(recorded) == pytest.approx(SERVEGEN_DAYS.period_s / 3600.0)
    assert np.median([strongest_period_h(run) for run in runs]) == pytest.approx(24.0)
