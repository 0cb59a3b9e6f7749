"""Episodes as long and tools as slow as those of real agents, with nothing to be learned.

Most episodes have a turn or two and most tools answer at once; a few have a hundred turns, and a
few tools take minutes. How many and how long is drawn from measured percentiles. Source: TraceLab,
SyFI Lab, University of Washington, summary tables, CC BY 4.0: steps that tools initiate per
request, and the latency of tool calls in seconds where it is above 0.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rose.rl.types import Step

Table = Sequence[tuple[float, float]]
"""Shares of all, ascending, and the value that this share does not exceed."""

TOOL_STEPS: Table = ((0.25, 0.0), (0.5, 1.0), (0.9, 20.0), (0.99, 86.0))
TOOL_SECONDS: Table = ((0.5, 0.3), (0.9, 13.6), (0.99, 216.0))
WORDS = ("file", "line", "found", "error", "ok", "test", "value", "none", "path", "done")
LONGEST_OBSERVATION = 40
"""Words. Made up, as is that all lengths up to it are equally frequent."""


def quantile(table: Table, u: float) -> float:
    """The value at the share `u`, on a line of its logarithm between two percentiles.

    Where one of them is 0 it is a line of the value itself. Below the first percentile the first
    line goes on, down to 0; above the last one nothing is known, and the value stays.
    """
    above = bisect_left([share for share, _ in table], u)
    above = min(max(above, 1), len(table) - 1)
    (low, least), (high, most) = table[above - 1], table[above]
    part = min((u - low) / (high - low), 1.0)
    if least > 0.0:
        return least * math.exp(part * math.log(most / least))
    return most * max(part, 0.0)


@dataclass
class LongTail:
    """A tool follows every turn but the last. Reward 1 if the model said anything each time."""

    time_scale: float = 0.01
    """Of the seconds that tools take."""
    turn_scale: float = 1.0
    """Of the number of tool steps."""
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    _rng: random.Random = field(default_factory=random.Random, init=False, repr=False)
    _seconds: list[float] = field(default_factory=list, init=False, repr=False)
    """Of the tools still to come, the next one last."""
    _silent: bool = field(default=False, init=False, repr=False)
    _playing: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("time_scale", "turn_scale"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")

    def reset(self, seed: int) -> str:
        self._rng = random.Random(seed)
        steps = round(quantile(TOOL_STEPS, self._rng.random()) * self.turn_scale)
        shares = [self._rng.random() for _ in range(steps)]
        self._seconds = [quantile(TOOL_SECONDS, share) * self.time_scale for share in shares]
        self._silent, self._playing = False, True
        return f"task {seed}: {self._text()}"

    async def step(self, action: str) -> Step:
        if not self._playing:
            raise RuntimeError("no episode is being played: reset comes first")
        self._silent |= not action.strip()
        if not self._seconds:
            self.close()
            return Step("", float(not self._silent), done=True)
        await self.sleep(self._seconds.pop())
        return Step(self._text())

    def close(self) -> None:
        self._playing = False

    def _text(self) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, LONGEST_OBSERVATION)))
