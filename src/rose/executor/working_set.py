"""What a prefix cache is worth keeping: the blocks that its users come back to.

The cache of an engine that nobody takes memory from is simulated beside the real one, by block
hashes and times alone (a ghost cache: least recently used first, as vLLM evicts). It sees hits that
the real cache no longer has, so lending cannot hide what it costs. Every hit tells how long a block
had not been in use until it came back; `patience` is the age below which all but `loss` of the
recent hits fell. Blocks younger than that are *warm*: taking them would lose hits.

What has not had time to come back says nothing. Blocks younger than `PRESUMED_S` count as warm too,
as long as they and the blocks in use are within `PRESUMED_SHARE` of the cache, so that the second
burst of a kind finds the first one's prefixes. Blocks that leave the simulated cache unhit have had
all the time that they could have: where next to all do, next to nothing is presumed. What is older,
and older than anything that usually comes back, is cold.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

LOSS = 0.02
"""Share of hits that may be lost, unless told otherwise."""
PRESUMED_S = 600.0
"""Ten minutes: users of chats and editors pause for minutes, seldom for longer."""
PRESUMED_SHARE = 0.5
"""The other half serves rollouts meanwhile."""
TRIALS = 8
"""Caches full of blocks that came back or were evicted, after which both counts are halved."""
SHORTEST_S = 0.25
PER_DOUBLING = 4
BUCKETS = 80
"""Ages are told apart by a fifth, from a quarter of a second to three days."""
REMEMBERED = 16_384
"""Hit blocks after which all counts are halved: old habits fade."""
COUNT_S = 0.25
"""The count of warm blocks is that old at most: it walks over the seconds of the cache's life."""


class Hits(NamedTuple):
    """Blocks of a prompt."""

    asked: int
    found: int
    """That a cache which nobody takes memory from has."""


class WorkingSet:
    def __init__(self, capacity: int, loss: float = LOSS) -> None:
        """`capacity`: blocks of the whole cache."""
        self._capacity = capacity
        self._loss = loss
        self._idle: OrderedDict[Hashable, float] = OrderedDict()
        """Blocks in nobody's use, with the time at which that began; the oldest first."""
        self._used: Counter[Hashable] = Counter()
        self._ages = [0] * BUCKETS
        self._hits = 0
        self._came_back = self._wasted = 0
        """Blocks that were hit, and that were evicted, since they became idle."""
        self._born: Counter[int] = Counter()
        """Idle blocks by the second in which they became idle."""
        self._counted = (-math.inf, 0)

    def begin(self, blocks: Sequence[Hashable], now: float) -> Hits:
        """A request came whose prompt has these blocks, each the hash of all up to it."""
        found = 0
        for block in blocks:
            since = self._idle.get(block)
            if since is None and block not in self._used:
                break
            self._hit(0.0 if since is None else now - since)
            found += 1
        for block in blocks:
            self._came_back += block in self._idle
            self._wake(block)
        self._evict()
        return Hits(len(blocks), found)

    def end(self, began: Sequence[Hashable], blocks: Sequence[Hashable], now: float) -> None:
        """The request that began with some blocks has ended with these, its answer's among them.

        Its last blocks are of least use to others: they become idle first.
        """
        for block in began:
            self._used[block] -= 1
            if self._used[block] <= 0:
                del self._used[block]
        for block in reversed(blocks):
            if block not in self._used:
                self._forget(block)
                self._idle[block] = now
                self._born[int(now)] += 1
        self._evict()

    def empty(self) -> None:
        """The cache was emptied: what is in nobody's use is gone."""
        self._idle.clear()
        self._born.clear()
        self._counted = (-math.inf, 0)

    def patience(self) -> float:
        """Age below which all but `loss` of the recent hits fell; 0 without hits."""
        beyond, allowed = 0, self._loss * self._hits
        for bucket in range(BUCKETS - 1, -1, -1):
            beyond += self._ages[bucket]
            if beyond > allowed:
                return SHORTEST_S * math.exp2((bucket + 1) / PER_DOUBLING)
        return 0.0

    def warm(self, now: float) -> int:
        """Idle blocks that are worth keeping."""
        if self._loss >= 1.0:
            return 0
        at, blocks = self._counted
        if now - at >= COUNT_S or now < at:
            blocks = self._count(now)
            self._counted = (now, blocks)
        return blocks

    def _count(self, now: float) -> int:
        proven_from, presumed_from = now - self.patience(), now - PRESUMED_S
        proven = presumed = 0
        for second, blocks in self._born.items():
            proven += blocks if second + 1 > proven_from else 0
            presumed += blocks if second + 1 > presumed_from else 0
        if not self._hits:
            proven = 0
        unproven = max(0, int(PRESUMED_SHARE * self._trust() * self._capacity) - len(self._used))
        return max(proven, min(presumed, unproven))

    def _trust(self) -> float:
        """Chance that a block comes back. To begin with, a cache full of them is believed to."""
        good = self._capacity + self._came_back
        return good / max(1, good + self._wasted)

    def _hit(self, age: float) -> None:
        bucket = int(PER_DOUBLING * math.log2(max(1.0, age / SHORTEST_S)))
        self._ages[min(bucket, BUCKETS - 1)] += 1
        self._hits += 1
        if self._hits >= REMEMBERED:
            self._ages = [count // 2 for count in self._ages]
            self._hits = sum(self._ages)

    def _wake(self, block: Hashable) -> None:
        self._forget(block)
        self._used[block] += 1

    def _forget(self, block: Hashable) -> None:
        since = self._idle.pop(block, None)
        if since is not None:
            second = int(since)
            self._born[second] -= 1
            if not self._born[second]:
                del self._born[second]

    def _evict(self) -> None:
        while self._idle and len(self._idle) + len(self._used) > self._capacity:
            self._forget(next(iter(self._idle)))
            self._wasted += 1
        if self._came_back + self._wasted > TRIALS * self._capacity:
            self._came_back //= 2
            self._wasted //= 2
