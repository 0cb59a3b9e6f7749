"""The requests of a serving engine as their deadlines see them, kept up from what happens to them.

`arrived`, `stepped` and `gone` tell what happened; the rest is read off. All of it is as of the end
of the last step, also while the next one already runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

from rose.executor import slo
from rose.executor.bounds import Queue
from rose.executor.facts import NEVER
from rose.executor.slo import Slo

PROMPTS_REMEMBERED = 512
FIRST_PROMPT = 256
"""Length assumed of new prompts before any has been seen."""
RATE_OVER, BURST_OVER = 64, 4
"""Arrivals over which their rate is measured, and over which a burst shows. A short run alone would
take chance for a change: a low estimate that is wrong is paid in late requests."""
BURST = 2.0
"""Times the usual rate that the last few must have come at to count instead."""
SILENCE = 5.0
"""Gaps of the usual length without any arrival that mean that it is no longer usual: by chance that
is one in 150."""


class Deadlines(NamedTuple):
    """The tightest of all requests."""

    decode: float
    """Next token, with credit."""
    prefill: float
    """First token."""
    tight_decode: float
    """Next token without credit: what the paper's rule looks at."""


class _Life:
    __slots__ = ("arrival", "computed", "emitted", "first", "last", "prompt")

    def __init__(self, arrival: float, prompt: int) -> None:
        self.arrival = arrival
        self.prompt = prompt
        self.computed = self.emitted = 0
        self.first = self.last = 0.0


class Lives:
    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self.prompts = Prompts()
        self.arrivals = Arrivals()

    def __len__(self) -> int:
        return len(self._lives)

    def __contains__(self, request: str) -> bool:
        return request in self._lives

    def arrived(self, request: str, prompt: int, at: float) -> None:
        self._lives[request] = _Life(at, prompt)
        self.arrivals.add(at)

    def begun(self, request: str, cached: int) -> None:
        """Its first step was scheduled, with so many tokens found in the prefix cache: what a new
        request costs is what is left."""
        if (life := self._lives.get(request)) is not None:
            self.prompts.add(max(1, life.prompt - cached))

    def stepped(self, request: str, computed: int, emitted: int, at: float) -> None:
        """A step ended: so many of the request's tokens are computed, so many are sent."""
        life = self._lives.get(request)
        if life is None:
            return
        life.computed = computed
        if emitted > life.emitted:
            if not life.emitted:
                life.first = at
            life.last = at
            life.emitted = emitted

    def gone(self, request: str) -> None:
        self._lives.pop(request, None)

    def names(self) -> list[str]:
        return list(self._lives)

    @property
    def started(self) -> int:
        """Requests that a step has taken; the others wait."""
        return sum(life.computed > 0 for life in self._lives.values())

    def queue(self) -> Queue:
        decode = starting = pending = context = 0
        for life in self._lives.values():
            context += life.computed
            if life.emitted:
                decode += 1
            else:
                starting += 1
                pending += max(0, life.prompt - life.computed)
        return Queue(decode, starting, pending, context)

    def deadlines(self, lendable: Slo, promise: Slo, credit_s: float) -> Deadlines:
        decode = prefill = last = NEVER
        for life in self._lives.values():
            if life.emitted:
                last = min(last, life.last)
                decode = min(
                    decode,
                    slo.next_token_deadline(
                        life.first, life.last, life.emitted, lendable, credit_s
                    ),
                )
            else:
                prefill = min(prefill, slo.first_token_deadline(life.arrival, lendable))
        return Deadlines(decode, prefill, last + promise.tpot_s)


class Prompts:
    """Recent prompt lengths, for the new request that may come at any time."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        if len(self._recent) > PROMPTS_REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def quantile(self, share: float) -> int:
        if not self._sorted:
            return FIRST_PROMPT
        return self._sorted[math.ceil(share * len(self._sorted)) - 1]


class Arrivals:
    """How many requests came, and how fast lately."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[float] = deque(maxlen=RATE_OVER + 1)

    def add(self, at: float) -> None:
        self.count += 1
        self._recent.append(at)

    def rate(self, now: float) -> float:
        """Per second; with few arrivals seen, an overestimate rather than an underestimate."""
        if not self._recent:
            return 0.0
        usual, lately = self._over(RATE_OVER, now), self._over(BURST_OVER, now)
        silent = SILENCE / max(now - self._recent[-1], 1e-3)
        return lately if lately > BURST * usual else min(usual, silent)

    def _over(self, arrivals: int, now: float) -> float:
        since = self._recent[-min(arrivals + 1, len(self._recent))]
        return max(1, min(arrivals, len(self._recent) - 1)) / max(now - since, 1e-3)
