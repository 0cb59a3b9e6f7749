"""KV of turns that ended, by device and trajectory: a later turn need not compute it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

NOTHING: Mapping[str, int] = {}


class Prefixes:
    def __init__(self, devices: int) -> None:
        self._kept: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(devices)]
        """Of each device tokens by trajectory, the longest unused first."""
        self._sums = [0] * devices
        self._of: dict[int, dict[str, int]] = {}
        """The same by trajectory: who places a turn need not look at every device."""

    def of(self, trajectory: int) -> Mapping[str, int]:
        """Tokens by device."""
        return self._of.get(trajectory, NOTHING)

    def keep(self, device: int, trajectory: int, tokens: int, room: int | None = None) -> None:
        """Its turn's KV stays until memory is wanted for others, now if `room` is less."""
        self.forget(device, trajectory)
        kept = self._kept[device]
        kept[trajectory] = tokens
        self._sums[device] += tokens
        self._of.setdefault(trajectory, {})[str(device)] = tokens
        if room is not None:
            self.fit(device, room)

    def fit(self, device: int, room: int) -> None:
        """No more than so many tokens stay; the longest unused go first."""
        kept = self._kept[device]
        while kept and self._sums[device] > room:
            self.forget(device, next(iter(kept)))

    def forget(self, device: int, trajectory: int) -> None:
        tokens = self._kept[device].pop(trajectory, None)
        if tokens is None:
            return
        self._sums[device] -= tokens
        held = self._of[trajectory]
        del held[str(device)]
        if not held:
            del self._of[trajectory]

    def clear(self, device: int) -> None:
        for trajectory in list(self._kept[device]):
            self.forget(device, trajectory)
