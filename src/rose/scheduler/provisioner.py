"""How many devices to borrow? A pure function of the work at hand and what devices make of it.

As many are borrowed as it takes until what there is to do would keep those at hand busy for no more
than `BORROW_S`: the turns at hand, and those that will likely follow in the same trajectories. All
at once: a fleet of 64 that came one by one would be there when the step is over. One is given back
when for a while nothing waits and the others would be done with all that runs within `RETURN_S`.
Between the two nothing changes, and after a change there is a pause, so the number does not flap.
Devices differ: the fastest that are offered are borrowed first, the slowest given back first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BORROW_S = 5.0
"""Activating a device takes part of a second, and its prefix cache is cold: less work is done
sooner by those that are there."""
RETURN_S = 5.0
PAUSE_S = 5.0
"""After a change: until its effect can be seen."""
KEEP_S = 60.0
"""While a trainer learns, nothing is asked for. A lease that is held and not used costs serving
nothing that it could not have back at once; to ask anew costs the job seconds, every step."""

MOST_TURNS = 8
"""That are expected to follow: by then much may have changed."""


def to_come(turns: int, usual: float) -> int:
    """Turns that will likely follow in a trajectory that has had so many: as many again, as lengths
    have heavy tails; or what a usual one still has before it."""
    return max(turns, round(usual) - 1 - turns)


@dataclass(frozen=True)
class Device:
    id: str
    tokens_per_s: float
    """That it makes, or is expected to."""
    held: bool
    dedicated: bool = False
    offered: bool = True


@dataclass(frozen=True)
class Demand:
    tokens: float
    """Still to be made, of turns waiting and running and of those that will follow."""
    waiting: int
    most: int
    """Devices that may be borrowed."""
    changed: float = -1e9
    """When the number last changed."""
    low_since: float | None = None
    """Since when `is_low`; None: it is not."""


def is_low(demand: Demand, devices: Sequence[Device]) -> bool:
    """Nothing waits, and one of the borrowed devices is not needed for what runs."""
    speeds = [d.tokens_per_s for d in devices if d.held and not d.dedicated and d.offered]
    if demand.waiting or not speeds:
        return False
    others = sum(d.tokens_per_s for d in devices if d.held) - min(speeds)
    return demand.tokens <= RETURN_S * others


def borrow(
    demand: Demand, devices: Sequence[Device], now: float, keep_s: float = KEEP_S
) -> set[str]:
    """The devices to hold, of those that are not dedicated."""
    lent = [d for d in devices if not d.dedicated and d.offered]
    held = [d for d in lent if d.held]
    free = [d for d in lent if not d.held]
    ids = {d.id for d in held}
    if now - demand.changed < PAUSE_S:
        return ids
    makes = sum(d.tokens_per_s for d in devices if d.held)
    more: set[str] = set()
    for device in sorted(free, key=lambda d: (-d.tokens_per_s, d.id)):
        if len(held) + len(more) >= demand.most or demand.tokens <= BORROW_S * makes:
            break
        more.add(device.id)
        makes += device.tokens_per_s
    if more:
        return ids | more
    if demand.low_since is not None and now - demand.low_since >= keep_s and held:
        return ids - {min(held, key=lambda d: (d.tokens_per_s, d.id)).id}
    return ids
