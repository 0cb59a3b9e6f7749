"""Work of HTTP servers, agents and schedulers where it has no cores of its own: devices do it."""

from __future__ import annotations

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
        return now + self.burden(self._at, seconds, fair=fair)

    def burden(self, device: Device, seconds: float, *, fair: bool = False) -> float:
        """Work on a device's core; how long until it is done."""
        device.advance(self._fleet.now)
        lasts = device.take_host(seconds, fair=fair)
        self._fleet.settle(device, self._fleet.now)
        return lasts
