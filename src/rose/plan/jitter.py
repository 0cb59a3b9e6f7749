"""Steps of one size do not all take as long: by how much they vary, as a profile measured it."""

from __future__ import annotations

import math

import numpy as np

from rose.executor.latency import QUANTILE, Profile
from rose.plan.workload.quantiles import Quantiles

DRAWN = 4096
"""Random numbers at once."""


def spread(profile: Profile) -> Quantiles:
    """Of measured over predicted in a profiling run.

    A profile knows three points of it: half of all steps are within `error` of the line, the
    `QUANTILE` is `margin`. Between them lines; below, as far as above the middle.
    """
    near, far = profile.error, max(profile.error, profile.margin - 1.0)
    points = (
        (0.0, max(0.0, 1 - 2 * near)),
        (0.25, max(0.0, 1 - near)),
        (0.75, 1 + near),
        (QUANTILE, 1 + far),
        (1.0, 1 + far),
    )
    return Quantiles(points)


class Jitter:
    """Factors with mean 1 and the spread of a profiling run."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self._law = spread(profile)
        self._mean = float(np.mean(self._law.at(np.linspace(0.0, 1.0, DRAWN))))
        self._rng = np.random.default_rng(seed)
        self._drawn: list[float] = []

    def factor(self, steps: int) -> float:
        """Of so many steps together, in which most of it evens out."""
        if not self._drawn:
            self._drawn = (self._law.values(DRAWN, self._rng) / self._mean - 1.0).tolist()
        return 1.0 + self._drawn.pop() / math.sqrt(steps)
