"""Chats of several turns with common system prompts: most of a prompt has been seen before.

A chat begins with one of a few system prompts. Each turn's prompt is the one before it, the answer
to that, and what the user says next. Answers are simulated: random tokens, as many as were asked
for, so that all modes send the same prompts whatever was answered; serving's own tokens are thus
never found again, only prompts are. The next turn comes after a think time, whether or not the
answer is there (open loop).

Chats are under way when the window begins. Requests begin `lead_s` before it: turns that fall into
that time, and for chats that would be silent in it their latest turn, so that each chat's history
has been seen once before it is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from rose.bench.arrivals import LogNormal, poisson
from rose.bench.pressure import DEEP
from rose.bench.rollouts import RolloutPlan
from rose.bench.traffic import Sent, Traffic, tokens, traffic

PAST_S = 120.0
"""Chats begin so long before the first request: hardly one lasts longer."""


@dataclass(frozen=True)
class Chats:
    rate: float
    """Turns a second, of all chats together."""
    systems: tuple[int, ...] = (32, 64, 96)
    """Tokens of the system prompts; a chat has any of them."""
    turns: tuple[int, int] = (1, 4)
    """Of a chat, fewest and most."""
    said: LogNormal = field(default=LogNormal(48, 0.6, 128))
    """What a user says in one turn."""
    output: LogNormal = field(default=LogNormal(8, 0.4, 20))
    pause_s: float = 2.0
    think_s: float = 12.0
    """Between two turns: `pause_s` and an exponential time with this mean."""
    lead_s: float = 12.0
    rollouts: RolloutPlan = DEEP
    warm_s: float = 12.0

    def traffic(self, seconds: float, seed: int) -> Traffic:
        rng = np.random.default_rng(seed)
        systems = [tokens(length, rng) for length in self.systems]
        begins_per_s = self.rate / (sum(self.turns) / 2)
        end = self.lead_s + seconds
        sent: list[Sent] = []
        for begin in poisson(begins_per_s, PAST_S + end, rng) - PAST_S:
            chat = list(self._chat(float(begin), systems[rng.integers(len(systems))], rng))
            moved = float(rng.uniform(0.0, self.lead_s))
            sent += self._heard(chat, moved, end)
        return traffic(sent, self.lead_s)

    def _chat(self, at: float, system: list[int], rng: Generator) -> Iterator[Sent]:
        """All turns of one chat."""
        prompt = list(system)
        for turn in range(rng.integers(self.turns[0], self.turns[1] + 1)):
            prompt = prompt + tokens(self.said.draw(1, rng)[0], rng)
            output = self.output.draw(1, rng)[0]
            yield Sent(at, prompt, output, "later turn" if turn else "first turn")
            prompt = prompt + tokens(output, rng)
            at += self.pause_s + rng.exponential(self.think_s)

    def _heard(self, chat: list[Sent], moved: float, end: float) -> list[Sent]:
        """What of a chat is sent; if it is silent in the lead, its latest turn at `moved`."""
        past = [turn for turn in chat if turn.at_s < 0.0]
        heard = [turn for turn in chat if 0.0 <= turn.at_s < end]
        if past and heard and heard[0].at_s >= self.lead_s:
            latest = past[-1]
            heard.insert(0, Sent(moved, latest.prompt, latest.output, latest.kind))
        return heard
