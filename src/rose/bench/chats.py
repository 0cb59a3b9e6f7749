"""Chats of several turns with common system prompts: most of a prompt has been seen before.

A chat begins with one of a few system prompts. Each turn's prompt is the one before it, the answer
to that, and what the user says next. Answers are simulated: random tokens, as many as were asked
for, so that all modes send the same prompts whatever was answered; serving's own tokens are thus
never found again, only prompts are. The next turn comes after a think time, whether or not the
answer is there (open loop). Users think for so long that `at_once` chats are under way at the rate
of the turns: how much of the memory their histories take does not depend on the device's speed.

Chats are under way when the window begins, and serving has seen their histories: before it, the
latest prompt of each chat that goes on is sent, the oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from rose.bench.arrivals import LogNormal, poisson
from rose.bench.pressure import MODEST
from rose.bench.rollouts import RolloutPlan
from rose.bench.traffic import Sent, Traffic, tokens, traffic

PAST = 12.0
"""Mean times between two turns of a chat, so long before the window chats begin: hardly one lasts
longer."""


@dataclass(frozen=True)
class Chats:
    rate: float
    """Turns a second, of all chats together."""
    at_once: float = 20.0
    systems: tuple[int, ...] = (32, 64, 96)
    """Tokens of the system prompts; a chat has any of them."""
    turns: tuple[int, int] = (1, 4)
    """Of a chat, fewest and most."""
    said: LogNormal = field(default=LogNormal(48, 0.6, 128))
    """What a user says in one turn."""
    output: LogNormal = field(default=LogNormal(8, 0.4, 20))
    pause: float = 0.2
    """Share of the mean time between two turns that nobody falls below; the rest is exponential."""
    lead_s: float = 8.0
    rollouts: RolloutPlan = MODEST
    warm_s: float = 12.0

    @property
    def between_s(self) -> float:
        """Two turns of a chat, in the mean."""
        return self.at_once / self.rate

    def traffic(self, seconds: float, seed: int) -> Traffic:
        rng = np.random.default_rng(seed)
        systems = [tokens(length, rng) for length in self.systems]
        begins_per_s = self.rate / (sum(self.turns) / 2)
        past_s = PAST * self.between_s
        known: list[Sent] = []
        sent: list[Sent] = []
        for begin in poisson(begins_per_s, past_s + seconds, rng) - past_s:
            system = systems[rng.integers(len(systems))]
            chat = list(self._chat(float(begin), system, rng))
            heard = [turn for turn in chat if 0.0 <= turn.at_s < seconds]
            known += [turn for turn in chat if turn.at_s < 0.0 and heard][-1:]
            sent += heard
        known.sort(key=lambda turn: turn.at_s)
        lead = [
            Sent(self.lead_s * number / len(known), turn.prompt, 1, turn.kind)
            for number, turn in enumerate(known)
        ]
        late = [Sent(self.lead_s + one.at_s, one.prompt, one.output, one.kind) for one in sent]
        return traffic([*lead, *late], self.lead_s)

    def _chat(self, at: float, system: list[int], rng: Generator) -> Iterator[Sent]:
        """All turns of one chat."""
        prompt = list(system)
        for turn in range(rng.integers(self.turns[0], self.turns[1] + 1)):
            prompt = prompt + tokens(self.said.draw(1, rng)[0], rng)
            output = self.output.draw(1, rng)[0]
            yield Sent(at, prompt, output, "later turn" if turn else "first turn")
            prompt = prompt + tokens(output, rng)
            at += self.between_s * (self.pause + rng.exponential(1.0 - self.pause))
