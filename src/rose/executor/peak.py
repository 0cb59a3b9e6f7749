"""The most that something has been lately."""

from __future__ import annotations

import math

OVER_S = 300.0
"""A burst is expected again for this long, and forgotten after twice as long."""


class Peak:
    def __init__(self, over_s: float = OVER_S) -> None:
        self._over_s = over_s
        self._began = -math.inf
        self._now = self._before = 0

    def of(self, value: int, now: float) -> int:
        """With this value: the most of this span of time and of the one before it."""
        if now - self._began >= self._over_s:
            fresh = now - self._began < 2 * self._over_s
            self._began, self._before, self._now = now, self._now if fresh else 0, 0
        self._now = max(self._now, value)
        return max(self._now, self._before)
