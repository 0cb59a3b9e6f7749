"""The KV hand-over as moves between states of two engines and a page, in terms of z3.

`moves` is all that can happen, at any moment: what the engines do, reads that are acted upon at any
later time, deaths and restarts. `holds` is true of every state there is. It says that both engines
together have at most what the device has, and why that stays so: whatever serving has read of the
rollout engine's claim is safe to act upon, and once serving has agreed to the latest claim (the
quota it published beside that revision leaves room for it), nothing that it may still do takes that
room away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import z3
from tests.proofs.symbolic import Number, value

from rose.executor import memory

total, kept, kv_max = z3.Ints("total kept kv_max")
DEVICE = z3.And(kept >= 0, kept <= total, kv_max >= 0)


class Share:
    """Any headroom: it keeps `kept` of the device, from nothing to all."""

    def __mul__(self, _: Number) -> Number:
        return Number(kept)


HEADROOM: Any = Share()


def quota_beside(claim: Any) -> Any:
    return z3.substitute(_quota(memory.serving_quota), (_claim, claim))


def agreed(claim: Any, revision: Any, acked: Any, quota: Any) -> Any:
    given = zip(_agreement, (claim, revision, acked, quota), strict=True)
    return z3.substitute(_agreed(memory.may_use), *given)


_claim, *_ = _agreement = z3.Ints("_claim _revision _acked _quota")


@cache
def _quota(rule: Callable[..., Any]) -> z3.ExprRef:
    return value(lambda: rule(Number(total), Number(_claim), HEADROOM, Number(kv_max)))


@cache
def _agreed(rule: Callable[..., Any]) -> z3.ExprRef:
    return value(lambda: rule(*map(Number, _agreement), Number(total)))


class State(NamedTuple):
    lives: Any
    """There is a rollout engine."""
    usable: Any
    claim: Any
    revision: Any
    """As on the page: to change a claim is to publish it."""
    quota: Any
    acked: Any
    page_quota: Any
    page_acked: Any
    told_quota: Any
    told_acked: Any
    """What the rollout engine has read of these and may act upon."""
    read_claim: Any
    read_revision: Any
    """What serving has read and may act upon."""


ANY = State(z3.Bool("lives"), *z3.Ints(" ".join(State._fields[1:])))
NOTHING = State(z3.BoolVal(False), *[z3.IntVal(0)] * 11)._replace(revision=z3.IntVal(1))


def holds(s: State) -> z3.BoolRef:
    may_become = [quota_beside(s.read_claim), quota_beside(s.claim), quota_beside(total)]
    agreements = (s.quota, s.acked), (s.page_quota, s.page_acked), (s.told_quota, s.told_acked)
    return z3.And(
        s.quota + s.usable <= total,
        s.quota >= 0,
        s.usable >= 0,
        s.usable <= s.claim,
        *(most + s.usable <= total for most in may_become),
        *(
            z3.Implies(
                z3.And(s.lives, acked == s.revision, quota + s.claim <= total),
                z3.And([most + s.claim <= total for most in (s.quota, *may_become)]),
            )
            for quota, acked in agreements
        ),
        s.revision > 0,
        *(known <= s.revision for known in (*(acked for _, acked in agreements), s.read_revision)),
        z3.Or(s.lives, s.usable == 0),
    )


def moves(s: State) -> Iterator[tuple[str, z3.BoolRef, State]]:
    """What, when, and what is then."""
    x, n = z3.Ints("x n")
    nobody, always = z3.IntVal(0), z3.BoolVal(True)
    most = quota_beside(s.read_claim)
    yield "rollout lowers", z3.And(x >= 0, x <= s.usable), s._replace(usable=x)
    may_stake = z3.And(s.lives, s.usable <= x, s.revision < n)
    yield "rollout stakes", may_stake, s._replace(claim=x, revision=n)
    may_raise = agreed(s.claim, s.revision, s.told_acked, s.told_quota)
    raises = z3.And(s.lives, may_raise, x >= 0, x <= s.claim)
    yield "rollout raises", raises, s._replace(usable=x)
    yield "rollout reads", s.lives, s._replace(told_quota=s.page_quota, told_acked=s.page_acked)
    yield "rollout dies", s.lives, s._replace(lives=z3.BoolVal(False), usable=nobody)
    started = s._replace(lives=always, claim=nobody, revision=n)
    yield "rollout starts", z3.And(z3.Not(s.lives), s.revision < n), started
    may_move = z3.And(x >= most, z3.Or(x == most, x <= s.quota))
    yield "serving moves", may_move, s._replace(quota=x)
    yield "serving acks", s.quota == most, s._replace(acked=s.read_revision)
    yield "serving publishes", always, s._replace(page_quota=s.quota, page_acked=s.acked)
    read = s._replace(read_claim=s.claim, read_revision=s.revision)
    yield "serving reads", s.lives, read
    nothing_read = s._replace(read_claim=nobody, read_revision=nobody)
    yield "serving finds nobody", z3.Not(s.lives), nothing_read
    yield "serving cannot read", always, s._replace(read_claim=total, read_revision=nobody)
    yield "serving dies and starts", always, s._replace(quota=nobody, acked=nobody)
