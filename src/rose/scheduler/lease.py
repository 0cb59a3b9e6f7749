"""The right to a device: what state it is in, and what its node has to be told. Pure.

    dormant -> activating -> active -> draining -> dormant

A node says how it is every few seconds; the answer to that is the order, if there is one. A node
that is not heard of is taken for lost, its turns go on elsewhere, and when it comes back it begins
anew. Serving takes a device back whenever it likes, without asking: the node then no longer offers
it, and the turns that were cut are resumed elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

LOST_S = 10.0
"""A few words that did not come."""
AGAIN_S = 30.0
"""An order that had no effect for so long is given again."""


class Phase(StrEnum):
    DORMANT = "dormant"
    ACTIVATING = "activating"
    ACTIVE = "active"
    DRAINING = "draining"


class Order(StrEnum):
    """What a node is told."""

    ACTIVATE = "activate"
    DRAIN = "drain"


@dataclass(frozen=True)
class Lease:
    phase: Phase = Phase.DORMANT
    since: float = 0.0


@dataclass(frozen=True)
class Word:
    """What a node said last."""

    at: float
    active: bool
    """Its rollout engine takes turns."""
    offered: bool
    """It may be borrowed now."""
    load: float = 0.0
    """Share of the time that serving has had requests lately."""
    memory: float = 1.0
    """Share of the KV memory that rollouts could have, which they may use now."""


def lost(word: Word, now: float) -> bool:
    return now - word.at > LOST_S


def step(lease: Lease, word: Word, *, wanted: bool, now: float) -> tuple[Lease, Order | None]:
    """The lease as it is after a node's word, and what to answer."""
    waits = now - lease.since < AGAIN_S
    if not word.offered:
        return _to(lease, Phase.DORMANT, now), None
    match lease.phase:
        case Phase.DORMANT if wanted:
            return _to(lease, Phase.ACTIVATING, now), Order.ACTIVATE
        case Phase.DORMANT if word.active:  # by somebody else, or before we began
            return _to(lease, Phase.DRAINING, now), Order.DRAIN
        case Phase.ACTIVATING | Phase.ACTIVE if not wanted:
            return _to(lease, Phase.DRAINING, now), Order.DRAIN
        case Phase.ACTIVATING if word.active:
            return _to(lease, Phase.ACTIVE, now), None
        case Phase.ACTIVATING if not waits:
            return replace(lease, since=now), Order.ACTIVATE
        case Phase.ACTIVE if not word.active:
            return _to(lease, Phase.DORMANT, now), None
        case Phase.DRAINING if not word.active:
            return _to(lease, Phase.DORMANT, now), None
        case Phase.DRAINING if not waits:
            return replace(lease, since=now), Order.DRAIN
    return lease, None


def _to(lease: Lease, phase: Phase, now: float) -> Lease:
    return lease if lease.phase == phase else Lease(phase, now)
