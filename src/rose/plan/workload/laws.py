"""Laws of when serving requests arrive, behind one method.

`times(rate, duration, rng)` gives sorted seconds within [0, duration) whose mean rate over the run
is `rate`, whatever the law: a target load stays a target load. Laws nest by `base`: a swing of the
rate moves the arrivals of the law below it, so `Diurnal(0.7, 1.4, base=GammaBursts(2))` has both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import numpy as np
from numpy.random import Generator

from rose.bench import arrivals
from rose.bench.arrivals import Counts, Times
from rose.plan.workload.curve import Curve

DAY_S = 86_400.0
STEPS = 288
"""Of one period: five minutes of a day, in which a sine moves 1 % of its range at most."""


class Law(Protocol):
    def times(self, rate: float, duration: float, rng: Generator) -> Times: ...


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals."""

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        return arrivals.poisson(rate, duration, rng)


@dataclass(frozen=True)
class GammaBursts:
    """Clumps of a few arrivals: gamma gaps with this coefficient of variation; 1 is Poisson."""

    cv: float = 2.0

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        return arrivals.gamma(rate, duration, rng, self.cv)


@dataclass(frozen=True)
class SquareBursts:
    """One burst of `burst_s` in every `cycle_s`, its busiest second at `peak` times the mean."""

    peak: float = 4.0
    burst_s: float = 2.0
    cycle_s: float = 10.0

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        return arrivals.bursty(rate, duration, rng, self.peak, self.burst_s, self.cycle_s)


@dataclass(frozen=True)
class Noisy:
    """The rate is drawn anew at random moments, `hold_s` apart on average.

    Levels are log-normal with this sigma. The rate's correlation falls as exp(-t / hold_s) with
    coefficient of variation sqrt(exp(sigma^2) - 1).
    """

    sigma: float
    hold_s: float
    base: Law = field(default=Poisson())

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        changes = np.sort(rng.uniform(0.0, duration, rng.poisson(duration / self.hold_s)))
        levels = np.exp(self.sigma * rng.standard_normal(len(changes) + 1))
        curve = Curve(np.concatenate(([0.0], changes, [duration])), levels)
        return curve.warp(self.base.times(rate, duration, rng))


@dataclass(frozen=True)
class Diurnal:
    """A sine of the rate from `low` to `high`, of which only the ratio counts."""

    low: float
    high: float
    period_s: float = DAY_S
    start_s: float = 0.0
    """Where in its period the run begins: 0 is the trough, half a period the peak."""
    base: Law = field(default=Poisson())

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high or self.high <= 0.0:
            raise ValueError(f"low is {self.low} and high {self.high}: give 0 <= low <= high")

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        edges = np.linspace(0.0, duration, max(2, ceil(STEPS * duration / self.period_s)) + 1)
        middle = (edges[:-1] + edges[1:]) / 2.0 + self.start_s
        up = (1.0 - np.cos(2.0 * np.pi * middle / self.period_s)) / 2.0
        curve = Curve(edges, self.low + (self.high - self.low) * up)
        return curve.warp(self.base.times(rate, duration, rng))


@dataclass(frozen=True)
class Copied:
    """The arrivals of a law at its own rate, each as often as it takes to reach the rate.

    Dealt to `rate / own_rate` devices, every device sees the law as it was fitted, clumps and all,
    and all see it at the same time: correlated spikes at their worst. Below its own rate arrivals
    are left out at random.
    """

    law: Law
    own_rate: float

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        found = self.law.times(self.own_rate, duration, rng)
        return found[copies(len(found), rate / self.own_rate, rng)]


def copies(count: int, factor: float, rng: Generator) -> Counts:
    """Each index `factor` times: a broken part of it is a chance."""
    whole = int(factor)
    return np.repeat(np.arange(count), whole + (rng.random(count) < factor - whole))
