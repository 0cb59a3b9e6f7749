"""KV of turns that ended, by device and trajectory: a later turn need not compute it again."""

from __future__ import annotations

from collections import OrderedDict


class Prefixes:
    def __init__(self, devices: int) -> None:
        self.held: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(devices)]
        """Of each device tokens by trajectory, the longest unused first."""
        self._sums = [0] * devices

    def keep(self, device: int, trajectory: int, tokens: int, room: int) -> None:
        """Its turn's KV stays until memory is wanted for others; the longest unused goes first."""
        cached = self.held[device]
        self._sums[device] += tokens - cached.pop(trajectory, 0)
        cached[trajectory] = tokens
        while cached and self._sums[device] > room:
            _, gone = cached.popitem(last=False)
            self._sums[device] -= gone

    def forget(self, device: int, trajectory: int) -> None:
        self._sums[device] -= self.held[device].pop(trajectory, 0)

    def clear(self, device: int) -> None:
        self.held[device].clear()
        self._sums[device] = 0
