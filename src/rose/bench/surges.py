"""Serving's memory demand jumps while rollouts hold most of the KV.

Short requests arrive all the time. In every cycle several long prompts arrive nearly at once, which
together need a quarter to half of the device's KV. Nothing is sent twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from rose.bench.arrivals import LogNormal, poisson
from rose.bench.colocated import SHORT
from rose.bench.pressure import MODEST
from rose.bench.rollouts import RolloutPlan
from rose.bench.traffic import Sent, Traffic, tokens, traffic

AT_ONCE_S = 0.3
"""A surge's prompts arrive within this."""
PLACE = (0.2, 0.8)
"""Where in its cycle a surge begins: never so close to the next one that both are one."""


@dataclass(frozen=True)
class Surges:
    rate: float
    """Requests a second, of both kinds."""
    kv_tokens: int
    """That fit into the device's KV."""
    share: tuple[float, float] = (0.25, 0.5)
    """Of the KV that a surge needs, least and most."""
    prompt: LogNormal = field(default=LogNormal(448, 0.1, 512))
    """Of a surge."""
    base: LogNormal = field(default=LogNormal(16, 0.5, 48))
    base_per_long: float = 5.0
    """Short requests for each long one: most of the time, but little of the device."""
    output: LogNormal = SHORT
    rollouts: RolloutPlan = MODEST
    warm_s: float = 12.0
    """Until rollouts hold most of the KV."""

    @property
    def cycle_s(self) -> float:
        """From surge to surge, such that all requests together come at `rate`."""
        surge = sum(self.share) / 2 * self.kv_tokens / self.prompt.median
        return surge * (1.0 + self.base_per_long) / self.rate

    def traffic(self, seconds: float, seed: int) -> Traffic:
        rng = np.random.default_rng(seed)
        base_rate = self.rate * self.base_per_long / (1.0 + self.base_per_long)
        sent = [
            self._sent(at, self.base, "base", rng)
            for at in poisson(base_rate, seconds, rng).tolist()
        ]
        cycles = max(1, round(seconds / self.cycle_s))
        cycle = seconds / cycles
        for number in range(cycles):
            begin = (number + rng.uniform(*PLACE)) * cycle
            needed = rng.uniform(*self.share) * self.kv_tokens
            while needed > self.prompt.median / 2:
                at = begin + rng.uniform(0.0, AT_ONCE_S)
                one = self._sent(at, self.prompt, "surge", rng)
                needed -= len(one.prompt)
                sent.append(one)
        return traffic(sent)

    def _sent(self, at: float, law: LogNormal, kind: str, rng: Generator) -> Sent:
        prompt = tokens(law.draw(1, rng)[0], rng)
        return Sent(at, prompt, self.output.draw(1, rng)[0], kind)
