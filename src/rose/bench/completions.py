"""Code completion: long prompts, short answers, bursts.

Recorded code completion (the code trace of Azure 2023) has prompts a hundred times as long as the
answers, and comes in bursts. Here both are smaller, as the models are. Most prompts have nothing in
common with any other. A share of the requests is of somebody who completes in the same file again:
an earlier prompt of the last seconds, and the few tokens that were typed since.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rose.bench.arrivals import LogNormal, bursty
from rose.bench.pressure import MODEST
from rose.bench.rollouts import RolloutPlan
from rose.bench.traffic import Sent, Traffic, tokens, traffic

LONGEST = 960
"""Engines read 1,024 tokens; a file that has grown past this is not asked about again."""


@dataclass(frozen=True)
class Completions:
    rate: float
    prompt: LogNormal = field(default=LogNormal(200, 0.6, 640))
    output: LogNormal = field(default=LogNormal(8, 0.5, 32))
    again: float = 0.3
    """Share of requests that complete in a file that was completed in before."""
    age_s: tuple[float, float] = (2.0, 20.0)
    """Of a prompt that comes back, least and most: nobody types faster."""
    typed: LogNormal = field(default=LogNormal(8, 0.5, 32))
    """Tokens since that prompt."""
    rollouts: RolloutPlan = MODEST
    warm_s: float = 12.0

    def traffic(self, seconds: float, seed: int) -> Traffic:
        rng = np.random.default_rng(seed)
        times = bursty(self.rate, seconds, rng, peak=4.0, burst_s=3.0, cycle_s=20.0, window_s=3.0)
        sent: list[Sent] = []
        for at in times.tolist():
            output = self.output.draw(1, rng)[0]
            if rng.random() < self.again and (earlier := self._earlier(sent, at)):
                file = earlier[rng.integers(len(earlier))].prompt
                typed = tokens(self.typed.draw(1, rng)[0], rng)
                sent.append(Sent(at, file + typed, output, "again"))
            else:
                new = tokens(self.prompt.draw(1, rng)[0], rng)
                sent.append(Sent(at, new, output, "new"))
        return traffic(sent)

    def _earlier(self, sent: list[Sent], at: float) -> list[Sent]:
        least, most = self.age_s
        return [
            one
            for one in sent
            if at - most <= one.at_s <= at - least and len(one.prompt) <= LONGEST
        ]
