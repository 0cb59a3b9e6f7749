"""Which devices are lent to rollouts, from when to when: provisioner, leases, revocations.

Once a second the live provisioner says how many devices it wants and the live lease of each what
happens to it. A device that is asked for takes turns after a while; one that is given back ends its
turns first; one that is taken away, by its owner or at the end of its time, loses them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rose.plan.device import Device
from rose.scheduler import lease, provisioner
from rose.scheduler.fleet import TYPICAL_TURNS
from rose.scheduler.lease import Lease, Order, Phase, Word

if TYPE_CHECKING:
    from rose.plan.fleet import Fleet

TICK_S = 1.0
"""Between two looks at who should be lent, as nodes report."""


class Kind(NamedTuple):
    """How rollouts may use the devices of a system."""

    placement: str = "cost"
    order: str = "longest_first"
    most_borrowed: int = 0
    activate_s: float = 0.1
    """From asking for a device until it takes turns."""
    keep_s: float = provisioner.KEEP_S
    revoked_per_s: float = 0.0
    """How often a borrowed device is taken away, for good or until it is asked for again."""
    away_s: float = 0.0
    limit_s: float = math.inf
    """A borrowed device is given back after so long (serverless)."""
    places: float = math.inf
    """Trajectories at once for every device that takes turns."""
    in_flight: float = math.inf
    """Trajectories at once in all."""
    dealt: bool = False
    """Trajectories wait for the places they were dealt to (`places`)."""
    gpus: int = 1
    """Of a device."""
    host_s: float = 0.0
    """Of devices' time that a turn takes beside its engine: HTTP, agents, where the host has no
    cores of its own."""
    front_s: float = 0.0
    """The same of a serving request, before its engine has it."""


@dataclass
class Lent:
    """One borrowed device."""

    lease: Lease = field(default_factory=Lease)
    wanted: bool = False
    active: bool = False
    offered: bool = True
    since: float = 0.0
    served_s: float = 0.0
    """Serving's time on the device when it was last looked at, and while it was lent."""
    served_lent_s: float = 0.0
    activating_s: float = 0.0
    lent_s: float = 0.0


class Lending:
    def __init__(
        self, fleet: Fleet, devices: Sequence[Device], kind: Kind, rng: np.random.Generator
    ) -> None:
        """`devices`: those that may be borrowed."""
        self._fleet, self._devices, self._kind, self._rng = fleet, devices, kind, rng
        self.lent = {d.number: Lent() for d in devices}
        self._changed = -1e9
        self._low_since: float | None = None
        self.timeline: list[tuple[float, int]] = []
        """When how many borrowed devices took turns."""
        if kind.most_borrowed and devices:
            fleet.at(0.0, self._tick)

    def release(self, now: float, away_s: float = 0.0) -> None:
        """All borrowed devices go back at once, and cannot be had for a while."""
        for device in self._devices:
            one = self.lent[device.number]
            one.wanted = False
            self._go(one, now, away_s)
            if one.active:
                self._take_back(device, one, now)

    def _tick(self, now: float) -> None:
        self._fleet.at(now + TICK_S, self._tick)
        devices = [self._device(d, now) for d in self._fleet.devices]
        demand = provisioner.Demand(
            self._fleet.work, self._fleet.waits, self._kind.most_borrowed, self._changed
        )
        if not provisioner.is_low(demand, devices):
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        demand = provisioner.Demand(
            demand.tokens, demand.waiting, demand.most, demand.changed, self._low_since
        )
        wanted = provisioner.borrow(demand, devices, now, self._kind.keep_s)
        for device in self._devices:
            one = self.lent[device.number]
            if one.wanted != (str(device.number) in wanted):
                self._changed = now
                one.wanted = not one.wanted
            self._lease(device, one, now)
        lent = sum(one.active for one in self.lent.values())
        if not self.timeline or self.timeline[-1][1] != lent:
            self.timeline.append((now, lent))

    def _device(self, device: Device, now: float) -> provisioner.Device:
        one = self.lent.get(device.number)
        makes = TYPICAL_TURNS / self._fleet.speed(device).token_s(TYPICAL_TURNS)
        if one is None:
            return provisioner.Device(str(device.number), makes, True, True)
        one.served_lent_s += (device.serving_s - one.served_s) * one.active
        one.served_s = device.serving_s
        one.lent_s += TICK_S * one.active
        one.activating_s += TICK_S * (one.wanted and not one.active)
        return provisioner.Device(str(device.number), makes, one.wanted, offered=one.offered)

    def _lease(self, device: Device, one: Lent, now: float) -> None:
        word = Word(now, one.active, one.offered)
        one.lease, told = lease.step(one.lease, word, wanted=one.wanted, now=now)
        if told == Order.ACTIVATE:
            ready = now + self._kind.activate_s
            self._fleet.at(ready, lambda then: self._activate(device, one, then))
        if one.active and one.lease.phase == Phase.DRAINING:
            self._fleet.withdraw(device)
            if not device.rollout.busy:
                self._take_back(device, one, now)

    def _activate(self, device: Device, one: Lent, now: float) -> None:
        if one.active or not one.offered or one.lease.phase != Phase.ACTIVATING:
            return
        one.active, one.since = True, now
        self._fleet.offer(device)
        device.advance(now)
        device.wake()
        self._fleet.settle(device, now)
        self._lease(device, one, now)
        self._risk(device, one, now)
        self._fleet.enter(now)
        self._fleet.dispatch(now)

    def _risk(self, device: Device, one: Lent, now: float) -> None:
        """When it will be taken away."""
        held = self._kind.limit_s
        if self._kind.revoked_per_s:
            held = min(held, float(self._rng.exponential(1 / self._kind.revoked_per_s)))
        if held < math.inf:
            since = one.since
            self._fleet.at(now + held, lambda then: self._revoke(device, one, since, then))

    def _revoke(self, device: Device, one: Lent, since: float, now: float) -> None:
        if one.active and one.since == since:
            self._take_back(device, one, now)
            self._go(one, now, self._kind.away_s)

    def _go(self, one: Lent, now: float, away_s: float) -> None:
        if away_s:
            one.offered = False
            self._fleet.at(now + away_s, lambda _: setattr(one, "offered", True))

    def _take_back(self, device: Device, one: Lent, now: float) -> None:
        one.active = False
        self._fleet.withdraw(device)
        self._fleet.empty(device, now)
        self._lease(device, one, now)
        self._fleet.enter(now)
        self._fleet.dispatch(now)
