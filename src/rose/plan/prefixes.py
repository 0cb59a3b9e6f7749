"""KV of turns that ended, by device and trajectory: a later turn need not compute it again."""

from __future__ import annotations

from collections import OrderedDict


class Prefixes:
    def __init__(self, devices: int) -> None:
        self._cached: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(devices)]
        self._held = [0] * devices

    def of(self, device: int) -> OrderedDict[int, int]:
        """Tokens by trajectory, the longest unused first."""
        return self._cached[device]

    def keep(self, device: int, trajectory: int, tokens: int, room: int) -> None:
        """Its turn's KV stays until memory is wanted for others; the longest unused goes first."""
        cached = self._cached[device]
        self._held[device] += tokens - cached.pop(trajectory, 0)
        cached[trajectory] = tokens
        while cached and self._held[device] > room:
            _, gone = cached.popitem(last=False)
            self._held[device] -= gone

    def forget(self, device: int, trajectory: int) -> None:
        self._held[device] -= self._cached[device].pop(trajectory, 0)

    def clear(self, device: int) -> None:
        self._cached[device].clear()
        self._held[device] = 0
