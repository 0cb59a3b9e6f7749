"""The prefixes of an engine's requests: what they are worth keeping, and what lending has cost.

One line of book per request, from its blocks' hashes when it comes to those when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rose.executor.working_set import WorkingSet

FADE = 0.999
"""Of old hits in the recent share that was lost, for each request: the last thousand count."""


class _Line(NamedTuple):
    blocks: Sequence[Any]
    """Hashes of its full blocks so far; vLLM adds to them."""
    began: tuple[Any, ...]
    found: int
    """Tokens that a cache which nobody takes memory from would have had."""
    tokens: int


class PrefixBook:
    def __init__(self, blocks: int, block_tokens: int, loss: float) -> None:
        self.cache = WorkingSet(blocks, loss)
        self._block_tokens = block_tokens
        self._open: dict[str, _Line] = {}
        self._uncounted: set[str] = set()
        self.tokens = self.hits = self.lost = 0
        """Prompt tokens so far, those found in the cache, and those lost to lending."""
        self._recent_found = self._recent_lost = 0.0

    @property
    def loss(self) -> float:
        """Share of recent hit tokens that lending has cost."""
        return self._recent_lost / self._recent_found if self._recent_found else 0.0

    def begin(self, request: str, blocks: Sequence[Any], tokens: int, now: float) -> None:
        # vLLM computes at least one token of a prompt, so its last block is never found whole.
        findable = tuple(blocks[: max(0, tokens - 1) // self._block_tokens])
        found = self.cache.begin(findable, now).found * self._block_tokens
        self._open[request] = _Line(blocks, findable, found, tokens)
        self._uncounted.add(request)

    def found(self, request: str, tokens: int) -> None:
        """The engine has looked its prompt up; only the first look counts."""
        if request not in self._uncounted:
            return
        self._uncounted.discard(request)
        line = self._open[request]
        lost = max(0, line.found - tokens)
        self.tokens += line.tokens
        self.hits += tokens
        self.lost += lost
        self._recent_found = FADE * self._recent_found + line.found
        self._recent_lost = FADE * self._recent_lost + lost

    def empty(self) -> None:
        """The engine's prefix cache was emptied; nothing of it was lost to lending."""
        self.cache.empty()

    def names(self) -> list[str]:
        return list(self._open)

    def end(self, request: str, now: float) -> None:
        line = self._open.pop(request, None)
        self._uncounted.discard(request)
        if line is not None:
            self.cache.end(line.began, tuple(line.blocks), now)
