import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.bench.arrivals import Drawn, Fixed, LogNormal, Request
from rose.plan.workload.laws import GammaBursts, Poisson
from rose.plan.workload.presets import AZURE_CHAT, SERVICES, Service
from rose.plan.workload.serving import Sizes, make_traffic, rate_for_load
from rose.plan.workload.traffic import Traffic

SIZES = Sizes(LogNormal(100, 1.0, 400), Drawn([3, 9]))


def bits(traffic: Traffic) -> tuple[bytes, ...]:
    return tuple(a.tobytes() for a in (traffic.arrival_s, traffic.prompt, traffic.output))


@pytest.mark.parametrize("service", SERVICES.values(), ids=list(SERVICES))
def test_a_seed_fixes_every_bit(service: Service) -> None:
    def make(seed: int) -> tuple[bytes, ...]:
        return bits(make_traffic(service.law, service.sizes, service.rate, 600.0, seed))

    assert make(3) == make(3)
    assert make(3) != make(4)


def test_lengths_are_whole_and_within_their_caps() -> None:
    traffic = make_traffic(Poisson(), SIZES, 50.0, 100.0, seed=0)
    assert traffic.prompt.dtype == traffic.output.dtype == np.int64
    assert traffic.prompt.min() >= 1
    assert traffic.prompt.max() == 400
    assert set(traffic.output.tolist()) == {3, 9}
    assert len(traffic) == len(traffic.prompt) == len(traffic.output)
    assert traffic.rate == pytest.approx(50.0, rel=0.1)


@given(st.integers(1, 40), st.integers(0, 9), st.floats(0, 100), st.floats(0, 100))
def test_dealing_and_cutting_lose_nothing(
    devices: int, seed: int, first: float, second: float
) -> None:
    traffic = make_traffic(GammaBursts(2.0), SIZES, 3.0, 100.0, seed)
    parts = traffic.split(devices, np.random.default_rng(seed))
    assert len(parts) == devices
    assert sorted(np.concatenate([p.arrival_s for p in parts])) == traffic.arrival_s.tolist()
    assert sum(int(p.prompt.sum()) for p in parts) == traffic.prompt.sum()
    begin, end = sorted((first, second))
    cuts = [traffic.slice(*cut) for cut in ((0.0, begin), (begin, end), (end, 100.0))]
    assert sum(map(len, cuts)) == len(traffic)
    assert all(np.all((c.arrival_s >= 0) & (c.arrival_s <= c.duration_s)) for c in cuts)


def test_requests_become_traffic() -> None:
    traffic = Traffic.of([Request(0.0, 5, 1), Request(1.0, 6, 2), Request(2.0, 7, 3)])
    assert traffic.prompt.tolist() == [5, 6, 7]
    assert traffic.output.tolist() == [1, 2, 3]
    assert traffic.duration_s == 3.0
    assert traffic.rate == 1.0
    assert len(Traffic.of([])) == 0


def test_load_becomes_a_rate() -> None:
    assert rate_for_load(0.5, 0.25) == 2.0
    assert rate_for_load(0.5, 0.25, devices=8) == 16.0
    with pytest.raises(ValueError, match="seconds_per_request"):
        rate_for_load(0.5, 0.0)


def test_senseless_traffic_is_refused() -> None:
    with pytest.raises(ValueError, match="rate is 0"):
        make_traffic(Poisson(), SIZES, 0.0, 1.0, seed=0)
    with pytest.raises(ValueError, match="duration is"):
        make_traffic(Poisson(), SIZES, 1.0, float("inf"), seed=0)
    with pytest.raises(ValueError, match="Poisson says nothing of lengths"):
        make_traffic(Poisson(), None, 1.0, 1.0, seed=0)
    with pytest.raises(ValueError, match="not sorted"):
        Traffic(np.array([1.0, 0.0]), np.ones(2, np.int64), np.ones(2, np.int64), 2.0)
    with pytest.raises(ValueError, match="differ in length"):
        Traffic(np.array([0.0]), np.ones(2, np.int64), np.ones(2, np.int64), 2.0)


def test_fixed_lengths_stay_fixed() -> None:
    traffic = make_traffic(Poisson(), Sizes(Fixed(7), Fixed(2)), 5.0, 10.0, seed=1)
    assert set(traffic.prompt.tolist()) == {7}
    assert set(traffic.output.tolist()) == {2}


def test_a_fleet_of_thousands_gets_a_million_requests() -> None:
    rate = AZURE_CHAT.rate * 4096
    traffic = make_traffic(AZURE_CHAT.everywhere, AZURE_CHAT.sizes, rate, 45.0, seed=0)
    parts = traffic.split(4096, np.random.default_rng(0))
    assert len(traffic) > 500_000
    assert sum(map(len, parts)) == len(traffic)
