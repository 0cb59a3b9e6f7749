"""Which prefixes engines likely hold: own bookkeeping of the turns sent, corrected by their word.

A prompt is a chain of blocks, each named by a hash of itself and all before it, so equal names mean
equal prefixes. Engines forget the least recently used blocks when their memory is full; so does
this. Blocks are larger than engines' own: the estimate decides between engines, not between blocks,
and thousands of trajectories have to be remembered.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Sequence

import xxhash

BLOCK = 128


def chain(tokens: Sequence[int], salt: str) -> list[int]:
    """Names of the whole blocks of a prompt; other weights (`salt`), other names."""
    state = xxhash.xxh3_64(salt.encode())
    data = memoryview(array("I", tokens)).cast("B")
    names = []
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        state.update(data[4 * (end - BLOCK) : 4 * end])
        names.append(state.intdigest())
    return names


class Prefixes:
    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = defaultdict(set)
        self._held: dict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """Of every engine, the longest unused first."""
        self._share: dict[str, float] = defaultdict(lambda: 1.0)
        """Of an engine's memory that prefixes seem to have."""

    def cached(self, names: Sequence[int]) -> dict[str, int]:
        """Tokens of a chain that engines hold, of those that hold any."""
        found: dict[str, int] = {}
        for number, name in enumerate(names, 1):
            holders = self._holders.get(name)
            if not holders:
                break
            for engine in holders:
                if number == 1 or found.get(engine) == (number - 1) * BLOCK:
                    found[engine] = number * BLOCK
        return found

    def hold(self, engine: str, names: Sequence[int], capacity: int) -> None:
        """An engine was sent a chain; it has memory for `capacity` tokens."""
        held = self._held[engine]
        for name in reversed(names):  # a chain loses its end first
            held[name] = None
            held.move_to_end(name)
            self._holders[name].add(engine)
        while len(held) * BLOCK > capacity * self._share[engine]:
            self._drop(engine, next(iter(held)))

    def correct(self, engine: str, believed: int, found: int) -> None:
        """It had so many tokens of a prompt, not those believed. What it forgot is not known, but
        then its memory holds less than was thought."""
        share = self._share[engine]
        self._share[engine] = (
            max(0.05, 0.8 * share) if 2 * found < believed else min(1.0, 1.05 * share)
        )

    def forget(self, engine: str) -> None:
        self._share.pop(engine, None)
        for name in list(self._held.pop(engine, ())):
            self._release(engine, name)

    def _drop(self, engine: str, name: int) -> None:
        del self._held[engine][name]
        self._release(engine, name)

    def _release(self, engine: str, name: int) -> None:
        holders = self._holders[name]
        holders.discard(engine)
        if not holders:
            del self._holders[name]
