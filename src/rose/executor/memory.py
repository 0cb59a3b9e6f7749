"""How a device's KV memory is split between serving and rollout: a pure policy and a hand-over.

*Split.* Serving needs `need` bytes now (held by running requests, plus what its queue will take)
and has `warm` bytes of cached prefixes that its users come back to (`working_set`). `headroom` of
the device is kept free beyond both. When need has eaten through `WATERMARK` of the headroom,
rollout's budget is cut, and the policy says how far and for how long. `trim` gives back until that
much of the headroom is free again; `aimd` gives back half of the budget, or more until all of the
headroom is free. Both grow back by `GROW_SHARE` of the device after each `CALM_S` without pressure.
`halve_and_freeze` (the paper's) stays at half until the next RL step. Warm prefixes that eat
through the watermark are no emergency: the budget gives way to them, and no further. Rollout takes
no more than it has a use for: its turns and its own warm prefixes, by the same measure. What
neither has a use for stays with serving. A dormant engine's budget is 0, and so is that of an
engine beside a serving engine whose facts have not been seen for `UNSEEN_S`: nobody knows what it
needs.

*Hand-over.* The rollout engine alone moves the border. It publishes a *claim* with a revision: what
it holds or is about to hold. Serving keeps its quota at `total - claim` and acknowledges the
revision once that is in force. Rollout lowers: give pages back, then publish the lower claim, and
serving rises. Rollout raises: publish the higher claim, wait for the acknowledgement, then use it
(`may_use`). At no time can the two exceed `total`, whatever messages are late and whoever crashes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from rose.executor.facts import MemoryPolicy

WATERMARK = 0.5
"""Share of the headroom serving may use up before rollout is cut: reacts before it is needed."""
CALM_S = 1.0
"""Time without pressure before `aimd` grows; bursts in real traces are a few seconds apart."""
GROW_SHARE = 1 / 16
"""Share of the device that `aimd` grows at a time: sixteen calm seconds give all of it back."""
UNSEEN_S = 1.0
"""Two facts periods: a thread that comes late on a busy host costs no turns."""
SURPLUS_SHARE = 1 / 8
"""Share of the device beyond its use that rollout gives back: less is not worth a hand-over."""
POLICIES = tuple(policy.name.lower() for policy in MemoryPolicy)


@dataclass(frozen=True)
class MemoryTerms:
    total: int
    headroom: float = 0.2
    policy: str = "trim"
    rollout_max: int = 0
    """Virtual size of the rollout engine's KV cache; a budget above it is useless."""


class Demand(msgspec.Struct, frozen=True):
    """What the policy looks at."""

    active: bool
    """The rollout engine has a lease and may hold memory."""
    serving_need: int
    unseen_s: float = 0.0
    """Since when serving's facts cannot be relied upon; 0 on a device without a serving engine."""
    rl_step: int = 0
    """Counts RL steps (or leases): what `halve_and_freeze` thaws on."""
    serving_warm: int = 0
    useful: int = sys.maxsize
    """What rollout has a use for now."""


class Budget(msgspec.Struct, frozen=True):
    """What rollout may use, and what the policy remembers."""

    bytes: int = 0
    calm_since: float = 0.0
    frozen_in: int | None = None
    """The RL step in which the budget was cut; None when it has grown back since."""


def ceiling(demand: Demand, terms: MemoryTerms) -> int:
    """The most rollout could hold with serving's headroom intact."""
    spare = terms.total - demand.serving_need - demand.serving_warm
    return max(0, min(spare - int(terms.headroom * terms.total), terms.rollout_max))


def reach(budget: Budget, demand: Demand, terms: MemoryTerms) -> int:
    """What the budget would be now if rollout had a use for all of it."""
    if not demand.active or demand.unseen_s > 0.0:
        return 0
    return ceiling(demand, terms) if budget.frozen_in is None else budget.bytes


def low_water(total: int, headroom: float) -> int:
    """Rollout is cut when less than this is left for serving beyond its need."""
    return int(headroom * total * (1.0 - WATERMARK))


def decide(budget: Budget, demand: Demand, terms: MemoryTerms, now: float) -> Budget:
    if not demand.active or demand.unseen_s > UNSEEN_S:
        return Budget(0, now, None)
    if demand.unseen_s > 0.0:
        return budget
    most, low = ceiling(demand, terms), low_water(terms.total, terms.headroom)
    left_for_serving = terms.total - budget.bytes - demand.serving_need
    if budget.bytes > 0 and left_for_serving < low:
        return Budget(_cut(budget, demand, terms, urgent=True), now, demand.rl_step)
    if budget.bytes > most:
        pressed = left_for_serving - demand.serving_warm < low
        left = _cut(budget, demand, terms, urgent=False) if pressed else budget.bytes
        return Budget(left, now, budget.frozen_in)
    goal = min(most, demand.useful)
    if budget.bytes >= goal:
        surplus = budget.bytes - goal > SURPLUS_SHARE * terms.total
        return replace(budget, bytes=goal) if surplus else budget
    if budget.frozen_in is None:
        return replace(budget, bytes=goal)
    return _regrow(budget, goal, demand, terms, now)


def _cut(budget: Budget, demand: Demand, terms: MemoryTerms, *, urgent: bool) -> int:
    """What is left of the budget; `urgent` when serving lacks more than room for warm prefixes."""
    if terms.policy == "trim":
        wanted = demand.serving_need + demand.serving_warm
        brink = terms.total - wanted - low_water(terms.total, terms.headroom)
        return max(0, min(budget.bytes, brink))
    most = ceiling(demand, terms)
    return min(budget.bytes // 2, most) if urgent else most


def _regrow(budget: Budget, goal: int, demand: Demand, terms: MemoryTerms, now: float) -> Budget:
    """After a cut, towards `goal`."""
    if terms.policy == "halve_and_freeze":
        return Budget(goal, now, None) if budget.frozen_in != demand.rl_step else budget
    if now - budget.calm_since < CALM_S:
        return budget
    grown = budget.bytes + max(1, int(GROW_SHARE * terms.total))
    if grown >= goal == ceiling(demand, terms):
        return Budget(goal, now, None)
    return Budget(min(grown, goal), now, budget.frozen_in)


def may_use(claim: int, revision: int, acked: int, serving_quota: int, total: int) -> bool:
    """Whether a raised claim may be filled: serving has made room and said so."""
    return acked >= revision and serving_quota + claim <= total


def serving_quota(total: int, claim: int, headroom: float, kv_max: int) -> int:
    """What serving may use beside a rollout claim; a lying claim never takes the headroom."""
    floor = int(headroom * total)
    return min(kv_max, max(floor, total - claim))
