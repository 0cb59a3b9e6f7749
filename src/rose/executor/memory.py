"""How a device's KV memory is split between serving and rollout: a pure policy and a hand-over.

*Split.* Serving needs `need` bytes now (held by running requests, plus what its queue will take).
`headroom` of the device is kept free beyond that. When serving has eaten through `WATERMARK` of the
headroom, rollout's budget is cut: to half, or further if half is not enough. What happens next is
the policy: `halve_and_freeze` (the paper's) stays there until the next RL step; `aimd` grows back
by `GROW_SHARE` of the device after each `CALM_S` without pressure. A dormant engine's budget is 0.

*Hand-over.* The rollout engine alone moves the border. It publishes a *claim* with a revision: what
it holds or is about to hold. Serving keeps its quota at `total - claim` and acknowledges the
revision once that is in force. Rollout lowers: give pages back, then publish the lower claim, and
serving rises. Rollout raises: publish the higher claim, wait for the acknowledgement, then use it
(`may_use`). At no time can the two exceed `total`, whatever messages are late and whoever crashes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

WATERMARK = 0.5
"""Share of the headroom serving may use up before rollout is cut: reacts before it is needed."""
CALM_S = 1.0
"""Time without pressure before `aimd` grows; bursts in real traces are a few seconds apart."""
GROW_SHARE = 1 / 16
"""Share of the device that `aimd` grows at a time: sixteen calm seconds give all of it back."""
POLICIES = ("aimd", "halve_and_freeze")


@dataclass(frozen=True)
class MemoryTerms:
    total: int
    headroom: float = 0.2
    policy: str = "aimd"
    rollout_max: int = 0
    """Virtual size of the rollout engine's KV cache; a budget above it is useless."""


class Demand(msgspec.Struct, frozen=True):
    """What the policy looks at."""

    active: bool
    """The rollout engine has a lease and may hold memory."""
    serving_need: int
    serving_alive: bool
    """Also on a device without a serving engine: nobody there could object."""
    rl_step: int = 0
    """Counts RL steps (or leases): what `halve_and_freeze` thaws on."""


class Budget(msgspec.Struct, frozen=True):
    """What rollout may use, and what the policy remembers."""

    bytes: int = 0
    calm_since: float = 0.0
    frozen_in: int | None = None
    """The RL step in which the budget was frozen."""


def ceiling(demand: Demand, terms: MemoryTerms) -> int:
    """The most rollout could hold with serving's headroom intact."""
    spare = terms.total - demand.serving_need - int(terms.headroom * terms.total)
    return max(0, min(spare, terms.rollout_max))


def low_water(total: int, headroom: float) -> int:
    """Rollout is cut when less than this is left for serving beyond its need."""
    return int(headroom * total * (1.0 - WATERMARK))


def decide(budget: Budget, demand: Demand, terms: MemoryTerms, now: float) -> Budget:
    if not demand.active:
        return Budget(0, now, None)
    most = ceiling(demand, terms)
    left_for_serving = terms.total - budget.bytes - demand.serving_need
    if budget.bytes > 0 and left_for_serving < low_water(terms.total, terms.headroom):
        return Budget(min(budget.bytes // 2, most), now, demand.rl_step)
    if not demand.serving_alive:
        return budget
    if budget.bytes >= most:
        return replace(budget, calm_since=now) if budget.bytes > most else budget
    if budget.bytes == 0 and budget.frozen_in is None:
        return Budget(most, now, None)
    if terms.policy == "halve_and_freeze":
        thawed = budget.frozen_in is None or budget.frozen_in != demand.rl_step
        return Budget(most, now, None) if thawed else budget
    if now - budget.calm_since < CALM_S:
        return budget
    grown = budget.bytes + max(1, int(GROW_SHARE * terms.total))
    return Budget(min(grown, most), now, budget.frozen_in)


def may_use(claim: int, revision: int, acked: int, serving_quota: int, total: int) -> bool:
    """Whether a raised claim may be filled: serving has made room and said so."""
    return acked >= revision and serving_quota + claim <= total


def serving_quota(total: int, claim: int, headroom: float, kv_max: int) -> int:
    """What serving may use beside a rollout claim; a lying claim never takes the headroom."""
    floor = int(headroom * total)
    return min(kv_max, max(floor, total - claim))
