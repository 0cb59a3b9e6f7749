"""Work of HTTP servers, agents and schedulers where it has no cores of its own: devices do it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rose.plan.device import Device

if TYPE_CHECKING:
    from rose.plan.fleet import Fleet


class Host:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._at = fleet.devices[0]

    def work(self, seconds: float, now: float, *, fair: bool = False) -> float:
        """It goes where least is going on, and else stays where it was, as a kernel wakes threads;
        when it is done. Turns wait for each other, in the same few processes; a serving request has
        others and is `fair`."""
        self._at = min(
            self._fleet.devices, key=lambda d: (d.runnable + (d.host > 0), d is not self._at)
        )
        self._at.advance(now)
        lasts = self._at.take_host(seconds, fair=fair)
        self._fleet.settle(self._at, now)
        return now + lasts

    def start_engine(self, device: Device, seconds: float, cpu_s: float) -> None:
        """An engine is started on a device's core; by the clock and in CPU time."""
        self._stranger(device, cpu_s / seconds, self._fleet.now)
        self._fleet.at(self._fleet.now + seconds, partial(self._stranger, device, 0.0))

    def _stranger(self, device: Device, share: float, now: float) -> None:
        device.advance(now)
        device.stranger = share
        self._fleet.settle(device, now)
