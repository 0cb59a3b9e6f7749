"""What is remembered of trajectories between two turns: where they were, and what is cached there.

Prefixes are known in large blocks (`prefixes`), which say nothing of a short context. Of its last
turn a trajectory's engine has all.
"""

from __future__ import annotations

from typing import NamedTuple

from rose.scheduler.prefixes import BLOCK

MOST = 10_000
"""Trajectories remembered; the longest unused go first."""


class Last(NamedTuple):
    engine: str
    version: str
    turns: int
    """Until now."""
    tokens: int
    """Of its context, in the engine's cache."""


NEW = Last("", "", 0, 0)


class Trajectories:
    def __init__(self) -> None:
        self._last: dict[str, Last] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._last

    def last(self, name: str) -> Last:
        return self._last.get(name, NEW)

    def placed(self, name: str, engine: str, version: str, tokens: int, *, last: bool) -> None:
        """A turn begins. The last one of a trajectory ends its memory."""
        turns = self._last.pop(name, NEW).turns + 1
        if name and not last:
            self._last[name] = Last(engine, version, turns, tokens)
        while len(self._last) > MOST:
            del self._last[next(iter(self._last))]

    def ended(self, name: str, tokens: int) -> None:
        """A turn has ended where it was, with that context."""
        if (known := self._last.get(name)) is not None:
            self._last[name] = known._replace(tokens=tokens)

    def believe(self, name: str, version: str, cached: dict[str, int]) -> None:
        """Correct what blocks say is `cached`, unless they say that much of it is gone."""
        last = self.last(name)
        if last.version == version and cached.get(last.engine, 0) >= last.tokens // BLOCK * BLOCK:
            cached[last.engine] = max(last.tokens, cached.get(last.engine, 0))
