"""What a simulated run came to: for the job, for serving, for the devices that were lent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rose.executor.slo import Slo

NOTHING = Slo(0.0, 0.0)


@dataclass(frozen=True)
class StepTime:
    rollout_s: float
    train_s: float
    sync_s: float
    seconds: float
    trajectories: int
    """Begun, of use or not."""
    tokens: int
    trained: int
    """Trajectories that the step learned from."""

    @property
    def batches(self) -> float:
        """Sampled for one that is learned from."""
        return self.trajectories / self.trained


@dataclass
class Outcome:
    """What became of a job under a system."""

    system: str
    steps: list[StepTime] = field(default_factory=list)
    began_s: float = 0.0
    """When the first of them did; what was before is not counted."""
    steady: bool = True
    """Otherwise steps are counted though the longest of the first trajectories have not ended."""
    ttft: np.ndarray = field(default_factory=lambda: np.empty(0))
    tpot: np.ndarray = field(default_factory=lambda: np.empty(0))
    slo: Slo = NOTHING
    lent: list[tuple[float, int]] = field(default_factory=list)
    """When how many devices were lent."""
    lent_s: float = 0.0
    activating_s: float = 0.0
    device_s: float = 0.0
    """Rollouts' time on borrowed devices."""
    idle_s: float = 0.0
    """Time that serving left on them while they were lent."""
    longest_s: float = 0.0
    """That a rollout step on a borrowed device may hold serving up."""
    late_expected: float = 0.0
    """Requests that rollout steps were expected to make late when they were granted."""
    cuts: int = 0
    made: int = 0
    """Tokens that engines made for turns."""
    prefix_hits: float = 0.0
    """Of rollouts."""
    asked: int = 0
    found: int = 0
    lost: int = 0
    """Tokens of serving's prompts, those found in its cache, and those that lending took there."""
    events: int = 0
    busy: float = 0.0
    """Share of the time that serving has had steps on its devices."""
    finished: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Seconds after its step began that each trajectory ended."""

    @property
    def throughput(self) -> float:
        """Trajectories a second that were trained on, over whole steps."""
        return sum(s.trained for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def rollout_s(self) -> float:
        return float(np.mean([s.rollout_s for s in self.steps]))

    def p99(self, what: str) -> float:
        values = getattr(self, what)
        values = values[~np.isnan(values)]
        return float(np.quantile(values, 0.99, method="higher")) if len(values) else math.nan

    @property
    def attainment(self) -> float | None:
        """Share of serving's requests that kept both promises."""
        if not len(self.ttft):
            return None
        return float(np.mean((self.ttft <= self.slo.ttft_s) & (self.tpot <= self.slo.tpot_s)))

    @property
    def harvest(self) -> float | None:
        return self.device_s / self.idle_s if self.idle_s else None

    @property
    def hit_rate(self) -> float | None:
        """Share of serving's prompt tokens that were cached; None if nobody came back."""
        return self.found / self.asked if self.asked else None

    @property
    def hit_rate_alone(self) -> float | None:
        """What that would have been if nothing had been lent."""
        return (self.found + self.lost) / self.asked if self.asked else None

    @property
    def sync_share(self) -> float:
        """Of the steps' time, what sending weights takes."""
        return sum(s.sync_s for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def allocation_overhead(self) -> float:
        """Share of the steps' time that devices were asked for and not there yet."""
        asked = self.lent_s + self.activating_s
        return self.activating_s / asked if asked else 0.0
