"""Steps vary around the line as much as a profile says."""

from __future__ import annotations

import numpy as np
import pytest

from rose.executor.latency import Profile
from rose.plan.jitter import Jitter

PROFILE = Profile("m", "d", 0.01, 0.001, 0.001, 0.0, margin=1.2, error=0.03)


def test_factors_have_the_profile_s_spread() -> None:
    jitter = Jitter(PROFILE, 0)
    drawn = np.array([jitter.factor(1) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(1.0, abs=0.003)
    middle = drawn / np.median(drawn)
    assert np.median(np.abs(middle - 1)) == pytest.approx(0.03, abs=0.003)
    assert np.quantile(middle, 0.99) == pytest.approx(1.2, abs=0.01)


def test_many_steps_together_vary_less_and_a_seed_gives_the_same() -> None:
    alone, many = (Jitter(PROFILE, 1).factor(steps) for steps in (1, 100))
    assert many - 1 == pytest.approx((alone - 1) / 10)
    assert Jitter(PROFILE, 2).factor(1) != alone
