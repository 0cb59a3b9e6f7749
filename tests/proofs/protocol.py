"""The KV hand-over as moves between states of the engines and a page, in terms of z3.

`moves` is all that can happen, at any moment: what the engines do, reads that are acted upon at any
later time, deaths and restarts, and a second serving engine beside the first one. `holds` is true
of every state there is. It says that the rollout engine and any one serving engine together have at
most what the device has, and why that stays so: whatever a serving engine has read of the rollout
engine's claim is safe to act upon, and once serving has agreed to the latest claim (the quota it
published beside that revision leaves room for it, and no second engine is said to be there),
nothing that any of them may still do takes that room away.
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
    two: Any
    """There is a second serving engine. It does as the first one, but does not publish."""
    rival: Any
    """The page says so, or said so a moment ago."""
    heard: Any
    """Serving's half of the page is of the first one: not while one that was the second has yet to
    write it."""
    quota2: Any
    acked2: Any
    read2_claim: Any
    read2_revision: Any


ANY = State(
    **{
        name: z3.Bool(name) if name in ("lives", "two", "rival", "heard") else z3.Int(name)
        for name in State._fields
    }
)
_NO, _YES, _ZERO = z3.BoolVal(False), z3.BoolVal(True), z3.IntVal(0)
NOTHING = State(_NO, *[_ZERO] * 11, _NO, _NO, _YES, *[_ZERO] * 4)._replace(revision=z3.IntVal(1))


def holds(s: State) -> z3.BoolRef:
    in_general = [quota_beside(s.claim), quota_beside(total)]
    firsts = [s.quota, quota_beside(s.read_claim), *in_general]
    seconds = [s.quota2, quota_beside(s.read2_claim), *in_general]
    room_of_first = z3.And([most + s.claim <= total for most in firsts])
    room_of_second = z3.Implies(s.two, z3.And([most + s.claim <= total for most in seconds]))
    agreements = (
        (s.quota, s.acked, room_of_first),
        (s.quota2, s.acked2, room_of_second),
        (s.page_quota, s.page_acked, z3.Implies(s.heard, room_of_first)),
        (s.told_quota, s.told_acked, z3.And(room_of_first, room_of_second)),
    )
    known = (*(acked for _, acked, _ in agreements), s.read_revision, s.read2_revision)
    return z3.And(
        s.quota >= 0,
        s.quota2 >= 0,
        s.usable >= 0,
        s.usable <= s.claim,
        *(most + s.usable <= total for most in firsts),
        z3.Implies(s.two, z3.And([most + s.usable <= total for most in seconds])),
        *(
            z3.Implies(z3.And(s.lives, acked == s.revision, quota + s.claim <= total), room)
            for quota, acked, room in agreements
        ),
        s.revision > 0,
        *(revision <= s.revision for revision in known),
        z3.Or(s.lives, s.usable == 0),
        z3.Implies(s.two, s.rival),
        z3.Or(s.rival, s.heard),
    )


RULES = ("rely on nobody beside a second", "rely on no half of another", "a second says so")
"""Rules about a second serving engine that the protocol cannot do without."""


def moves(s: State, without: str = "") -> Iterator[tuple[str, z3.BoolRef, State]]:
    """What, when, and what is then. `without` one of the rules."""
    x, n = z3.Ints("x n")
    yield "rollout lowers", z3.And(x >= 0, x <= s.usable), s._replace(usable=x)
    may_stake = z3.And(s.lives, s.usable <= x, s.revision < n)
    yield "rollout stakes", may_stake, s._replace(claim=x, revision=n)
    may_raise = agreed(s.claim, s.revision, s.told_acked, s.told_quota)
    raises = z3.And(s.lives, may_raise, x >= 0, x <= s.claim)
    yield "rollout raises", raises, s._replace(usable=x)
    may_read = z3.And(s.lives, z3.Or(z3.Not(s.rival), without == RULES[0]))
    told = s._replace(told_quota=s.page_quota, told_acked=s.page_acked)
    yield "rollout reads", may_read, told
    yield "rollout dies", s.lives, s._replace(lives=_NO, usable=_ZERO)
    started = s._replace(lives=_YES, claim=_ZERO, revision=n)
    yield "rollout starts", z3.And(z3.Not(s.lives), s.revision < n), started
    for name, when, one in _moves_of_serving(s, _first(s)):
        yield f"serving {name}", when, _as_first(s, one)
    published = s._replace(page_quota=s.quota, page_acked=s.acked, heard=_YES)
    yield "serving publishes", _YES, published
    yield "serving dies and starts", _YES, s._replace(quota=_ZERO, acked=_ZERO)
    for name, when, one in _moves_of_serving(s, _second(s)):
        yield f"second {name}", z3.And(s.two, when), _as_second(s, one)
    looked = Engine(_ZERO, _ZERO, s.claim, s.revision)
    said = s.rival if without == RULES[2] else _YES
    starts = _as_second(s, looked)._replace(two=_YES, rival=said)
    yield "second starts", z3.Not(s.two), starts
    gone = _as_second(s, Engine(_ZERO, _ZERO, _ZERO, _ZERO))._replace(two=_NO)
    yield "second dies", s.two, gone
    heard = _YES if without == RULES[1] else _NO
    yield "second is the first one now", s.two, _as_first(gone, _second(s))._replace(heard=heard)
    yield "nobody was second lately", z3.And(z3.Not(s.two), s.heard), s._replace(rival=_NO)


class Engine(NamedTuple):
    """A serving engine."""

    quota: Any
    acked: Any
    read_claim: Any
    read_revision: Any


def _first(s: State) -> Engine:
    return Engine(s.quota, s.acked, s.read_claim, s.read_revision)


def _as_first(s: State, one: Engine) -> State:
    return s._replace(**one._asdict())


def _second(s: State) -> Engine:
    return Engine(s.quota2, s.acked2, s.read2_claim, s.read2_revision)


def _as_second(s: State, one: Engine) -> State:
    return s._replace(**dict(zip(State._fields[-4:], one, strict=True)))


def _moves_of_serving(s: State, one: Engine) -> Iterator[tuple[str, z3.BoolRef, Engine]]:
    x = z3.Int("x")
    most = quota_beside(one.read_claim)
    may_move = z3.And(x >= most, z3.Or(x == most, x <= one.quota))
    yield "moves", may_move, one._replace(quota=x)
    yield "acks", one.quota == most, one._replace(acked=one.read_revision)
    # Also of one that is dead, while the kernel cannot say so.
    yield "reads", _YES, one._replace(read_claim=s.claim, read_revision=s.revision)
    nothing_read = one._replace(read_claim=_ZERO, read_revision=_ZERO)
    yield "finds nobody", z3.Not(s.lives), nothing_read
    yield "cannot read", _YES, one._replace(read_claim=total, read_revision=_ZERO)
