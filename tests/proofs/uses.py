"""How many steps begin on one window, and whom they are in the way of: the real `Gate`.

`may_begin` is what `Gate.decide` and `Gate.granted` say for any window that admission may have
answered, as a condition on the moment at which a step begins, on the arrivals word then, and on the
steps that have begun. `moves` is all that can happen while the window stands: steps, and one new
request, also between the look at the word and the step itself (then it comes during the step). An
idle serving engine notes it at once. One with a step in flight may note it only when that ends,
and `course` has the request wait for that.

`holds` is true in every state: of all steps that begin on the window, one at most ends after the
arrival of the new request; and beside requests there is only one. So any number of steps on a
window leave the device as the one step of `timeline.course` does, begun at any time until `until`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import z3
from tests.proofs import timeline
from tests.proofs.symbolic import Number, counterexample, value
from tests.proofs.timeline import Case, Grant, arrival, begins, new, whole

from rose.executor import admission, gate
from rose.executor.admission import Terms, Window
from rose.executor.facts import ServingFacts

moment, until, seconds = z3.Reals("moment until seconds")
word, known, begun, steps, ended = z3.Ints("word known begun steps ended")
"""`known`: arrivals that the facts know. `steps` had begun at the decision, `ended` were over."""


def may_begin(*, once: bool, seen: bool = True) -> z3.BoolRef:
    """Whether a step may begin at `moment`. `seen`: serving was, at the decision."""
    facts = SimpleNamespace(facts=ServingFacts(arrivals=Number(known)))
    page: Any = SimpleNamespace(
        lending=lambda _: facts if seen else None, arrivals=lambda: Number(word)
    )
    latency: Any = SimpleNamespace(
        upper=lambda _: 0.0,
        likely=SimpleNamespace(margin=1.0),
        margin=1.0,
        within=lambda seconds, _: SimpleNamespace(tokens=lambda *_: 1 if seconds > 0 else 0),
    )
    answer = Window(Number(seconds), Number(until), once)

    def granted() -> bool:
        mine = gate.Gate(page, latency, float, dedicated=False, chunk=1, clock=float)
        mine.begun, mine._ended = Number(steps), Number(ended)
        mine.decide(Terms(), active=True, turns=1, context=1)
        mine.begun, mine.watchful = Number(begun), True
        return mine.granted(1, Number(moment)) > 0

    with mock.patch.object(admission, "window", return_value=answer):
        return value(granted)


def wrong_begins() -> Iterator[str]:
    """Steps that begin although nothing was granted."""
    for once in (False, True):
        alone = z3.And(begun == steps, steps == ended) if once else z3.BoolVal(True)
        granted = z3.And(moment <= until, seconds > 0, word == known, alone)
        if model := counterexample(z3.Implies(may_begin(once=once), granted)):
            yield f"once={once}: {model}"
        if model := counterexample(z3.Not(may_begin(once=once, seen=False))):
            yield f"unseen, once={once}: {model}"


class State(NamedTuple):
    word: Any
    came: Any
    """A request that the facts do not know."""
    behind: Any
    """Steps that end after it came; beside requests, all of them."""
    begun: Any


ANY = State(word, z3.Bool("came"), z3.Int("behind"), begun)


def first(once: bool) -> z3.BoolRef:
    """When the decision is made; what came before may be noted and not be in the facts."""
    noted = z3.Or(ANY.came == (word > known), z3.And(once, ANY.came))
    return z3.And(word >= known, noted, ANY.behind == 0, begun == steps)


def holds(once: bool) -> z3.BoolRef:
    return _holds(ANY, once)


def _holds(s: State, once: bool) -> z3.BoolRef:
    if once:
        return z3.And(s.behind == s.begun - steps, s.behind >= 0, s.behind <= 1)
    noted = z3.And(s.word >= known, z3.Implies(s.came, s.word > known))
    return z3.And(noted, s.behind >= 0, s.behind <= z3.If(s.came, 1, 0))


def moves(once: bool) -> Iterator[tuple[str, z3.BoolRef, z3.BoolRef]]:
    """What, when, and whether all is well then."""
    s, yes = ANY, z3.BoolVal(True)
    noted = s._replace(word=s.word + 1, came=yes)
    yield "a request comes", z3.Not(s.came), _holds(noted, once)
    if once:
        yield "one comes unnoted", z3.Not(s.came), _holds(s._replace(came=yes), once)
    step, may = s._replace(begun=s.begun + 1), may_begin(once=once)
    counted = z3.BoolVal(once)
    yield (
        "a step",
        may,
        _holds(step._replace(behind=s.behind + z3.If(z3.Or(s.came, counted), 1, 0)), once),
    )
    during = step._replace(word=s.word + 1, came=yes, behind=s.behind + 1)
    yield "a step, and a request during it", z3.And(may, z3.Not(s.came)), _holds(during, once)


def too_many() -> Iterator[str]:
    """Moves after which more than one step is in somebody's way."""
    for once in (False, True):
        if model := counterexample(holds(once), first(once)):
            yield f"once={once}: {model}"
        for name, when, well in moves(once):
            if model := counterexample(well, holds(once), when):
                yield f"once={once}, {name}: {model}"


def several(grant: Grant, case: Case, count: int) -> z3.BoolRef:
    """Steps on the window of an idle serving engine, one after the other; those that end after the
    new request came are in its way."""
    asked = may_begin(once=False)
    events, behind, rest = [], z3.RealVal(0), z3.RealVal(0)
    free = timeline.now
    for n in range(count):
        at, long = z3.Reals(f"begins{n} whole{n}")
        noted = known + z3.If(z3.And(new, arrival < at), 1, 0)
        one = z3.substitute(asked, (moment, at), (word, noted), (begun, steps + n))
        in_time = z3.substitute(grant.in_time, (begins, at))
        events += [one, in_time, at >= free, long >= 0, long <= grant.whole]
        free = at + long
        met = z3.Or(z3.Not(new), arrival < free)
        behind += z3.If(met, grant.longest if case.preempt else long, 0)
        rest += z3.If(met, long, 0)
    return z3.And(*events, begins == at, timeline.took <= behind, whole <= rest)
