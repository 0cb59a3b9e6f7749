"""Where does a turn go? Pure functions of the turn, the engines and what each has cached.

`cost`, the default, takes the engine where the turn is expected to end first, and counts what it
takes from others there as its own:

    wait for those ahead  +  prefill of what is not cached  +  decoding  +  others  +  risk  +  rest

all at the engine's measured speed with one more turn, which has in it what serving takes. Others
are the turns that run there: each waits for the whole prefill, and each of its tokens is slower by
the turn's own. Without the former a turn leaves its prefix for any engine that is a little faster,
makes all those there wait, and the next one does the same; without the latter all would crowd on
the fast engines until those are no faster than the others. The rest is the decoding of turns
that will likely follow, about as many as there were, as lengths of trajectories have heavy tails:
so a long one pays a prefill once to be on a fast engine, and a short one stays where its prefix is.
The risk of a borrowed engine is the chance that it is taken back before the end, times what has to
be done again: queueing and prefill of the whole context. Affinity needs no rule: a cached prefix is
prefill that is not paid, and samples of one prompt stay together as long as waiting for the first
one's prefill is not much longer than doing it again. An engine that falls behind is not chosen,
however much it has cached, so nothing stays pinned to it.

While more turns wait than there are places (`crowded`), a faster engine is no gain: another turn
would have had it. What counts then is work that nobody has to do twice. So a turn stays where its
prefix is, and where that engine has no place it waits for one, unless computing the prefix anew
elsewhere takes less, of its own time and of those there.

The others are there to be compared with: `paper` (the engine of the turn before while it has room,
then any borrowed one with room, then the least loaded), `least_loaded`, `round_robin`, `sticky`
(always the engine of the turn before).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from rose.scheduler.facts import EngineFacts, Standing

TO_COME = 0.5
"""Turns that will wait for a prefill beside those that run there already."""
MOST_FURTHER = 8
"""Turns that a decision looks ahead: engines will not stay as they are for longer."""
PAPER_CAP = 16
"""Trajectories per GPU in the paper."""


class Placing(msgspec.Struct, frozen=True):
    """All that decides on where a turn goes."""

    context: int
    """Tokens to be there before the first new one."""
    expected: int
    """New tokens that it will likely make."""
    cached: Mapping[str, int]
    """Tokens of it that engines have, as far as is known."""
    before: str | None = None
    """Engine of the trajectory's turn before."""
    further: int = 0
    """Turns that will likely follow."""
    number: int = 0
    """How many were placed before, for taking turns."""
    crowded: bool = False
    """More turns wait than engines have places."""
    ahead: int = 0
    """Turns that wait for a place at the same engine as before and go first."""


def place(policy: str, turn: Placing, engines: Sequence[EngineFacts]) -> EngineFacts | None:
    """The engine to send it to; None if it has to wait."""
    return POLICIES[policy](turn, engines)


def _roomy(turn: Placing, engines: Sequence[EngineFacts]) -> list[EngineFacts]:
    return [engine for engine in engines if has_room(turn, engine)]


def is_full(engine: EngineFacts) -> bool:
    return engine.standing == Standing.READY and engine.running >= engine.slots


def wait_s(turn: Placing, engine: EngineFacts) -> float:
    """Until a full engine has a place for it: turns end there one after the other."""
    apart_s = turn.expected * engine.speed.token_s(engine.running) / engine.running
    return (1 + turn.ahead) * apart_s


def has_room(turn: Placing, engine: EngineFacts) -> bool:
    """Whether an engine may get it: ready, not over its slots, and memory for all of it.

    A turn that no engine could ever hold goes to an empty one, which says so.
    """
    if engine.standing != Standing.READY or engine.running >= engine.slots:
        return False
    fits = engine.context + turn.context + turn.expected <= engine.capacity
    return fits or not engine.running


class Reason(StrEnum):
    """Why a turn went where it went, as far as that can be seen from outside of a policy."""

    STAYED = "stayed"
    """With the engine of the turn before, or that has most of its prompt."""
    PREFIX = "prefix"
    """Another one has as much of it."""
    MOVED = "moved"
    """Away from what is cached elsewhere."""
    NEW = "new"
    """Nobody has anything of it."""


def reason(turn: Placing, engine: str) -> Reason:
    if engine == turn.before:
        return Reason.STAYED
    most = max(turn.cached.values(), default=0)
    if most and turn.cached.get(engine, 0) == most:
        return Reason.PREFIX
    return Reason.MOVED if most or turn.before is not None else Reason.NEW


def cost_s(turn: Placing, engine: EngineFacts) -> float:
    """Estimated seconds until the turn ends there, and those that it takes from others."""
    speed, running, expected = engine.speed, engine.running, turn.expected
    own_s = anew_s(turn, engine)
    decode_s = expected * speed.token_s(running + 1)
    needs_s = engine.prefill_left * speed.prefill_s + own_s + decode_s
    slows_s = expected * speed.turn_s * running
    others_s = _with_others(own_s, engine) - own_s + slows_s
    risk_s = 0.0
    if engine.revoked_per_s:
        again_s = (turn.context + expected / 2) * speed.prefill_s
        risk_s = min(1.0, engine.revoked_per_s * needs_s) * again_s
    rest_s = min(MOST_FURTHER, turn.further) * (decode_s + slows_s)
    return needs_s + others_s + risk_s + rest_s


def price_s(turn: Placing, engine: EngineFacts) -> float:
    """Of computing what it has not cached: the turn waits for it, and all that are there."""
    return _with_others(anew_s(turn, engine), engine)


def _with_others(prefill_s: float, engine: EngineFacts) -> float:
    """Waited for by a turn, by those that run there and by those that will."""
    return prefill_s * (1 + engine.running + TO_COME)


def anew_s(turn: Placing, engine: EngineFacts) -> float:
    """To compute what it has not cached."""
    return max(0, turn.context - turn.cached.get(engine.id, 0)) * engine.speed.prefill_s


def _cost(turn: Placing, engines: Sequence[EngineFacts]) -> EngineFacts | None:
    home = next((e for e in engines if e.id == turn.before), None) if turn.crowded else None
    if home is not None and has_room(turn, home):
        return home
    best = min(_roomy(turn, engines), key=lambda e: (cost_s(turn, e), e.id), default=None)
    if best is None or home is None or not is_full(home):
        return best
    waits = wait_s(turn, home) + price_s(turn, home) < price_s(turn, best)
    return None if waits else best


def _least_loaded(turn: Placing, engines: Sequence[EngineFacts]) -> EngineFacts | None:
    engines = _roomy(turn, engines)
    return min(engines, key=lambda e: (e.running / e.slots, e.id), default=None)


def _round_robin(turn: Placing, engines: Sequence[EngineFacts]) -> EngineFacts | None:
    engines = _roomy(turn, engines)
    return engines[turn.number % len(engines)] if engines else None


def _sticky(turn: Placing, engines: Sequence[EngineFacts]) -> EngineFacts | None:
    before = next((e for e in _roomy(turn, engines) if e.id == turn.before), None)
    return before or _least_loaded(turn, engines)


def _paper(turn: Placing, engines: Sequence[EngineFacts]) -> EngineFacts | None:
    roomy = _roomy(turn, engines)
    # The cap is on trajectories: one that was there before is counted already.
    before = next((e for e in roomy if e.id == turn.before), None)
    roomy = [e for e in roomy if e.running < PAPER_CAP * e.gpus]
    borrowed = _least_loaded(turn, [e for e in roomy if e.borrowed])
    return before or borrowed or _least_loaded(turn, roomy)


POLICIES: dict[str, Callable[[Placing, Sequence[EngineFacts]], EngineFacts | None]] = {
    "cost": _cost,
    "paper": _paper,
    "least_loaded": _least_loaded,
    "round_robin": _round_robin,
    "sticky": _sticky,
}
