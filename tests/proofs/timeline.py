"""What can happen on a device after admission granted a rollout step, in terms of z3.

*Course.* Serving's step in flight would end at `flight`, by `step_ends + occupied_s`. Then come
steps of serving that take `before` and bring every running request `lead / tpot_s` tokens, then the
one that takes `held`. The rollout step takes `whole` of the device, and holds serving up by at most
what was granted, wherever among them: `delay` of it before the held-up step ends, `early` of that
before the token before. Waiting requests have their first tokens when serving has worked for
`clearing`. One new request may come: while the step in flight is running, in the middle of a later
one (which it has missed by at most `missed`), or during the rollout step. It may have its first
token before the rollout step is over: the step that brings its second one takes `later`. If serving
lacks memory, it may have to wait until the rollout step has ended and for `give_back` more.

*Premises.* Serving's bounds are true, as `bounds` defines them, as long as the facts hold: of the
next step and of all steps until the queue is clear, with the new request if there is one, of the
next step once the new one decodes, and k steps take at most `(k - 1) * tpot_s` more than the bound
of the next. The facts hold until the promised end of the step in flight, and until they are
`FACTS_S` old. Serving has requests if and only if a step is in flight, and no deadlines without
requests. A new request finds memory unless `kv_lacks` says that it may not.

`uses.py` is about the rest: how many steps can begin on what was granted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import z3
from tests.proofs.symbolic import Number, paths, term, value

from rose.executor import admission
from rose.executor.facts import FACTS_S, NEVER, ServingFacts
from rose.executor.slo import Slo, next_token_deadline

# What the rule is told.
now, occupied, worth, busy, preempt, written = z3.Reals("now occupied worth busy preempt written")
step_began, step_ends, decode_due, first_due = z3.Reals("step_began step_ends decode_due first_due")
next_step, clear = z3.Reals("next_step clear")
next_with_new, clear_with_new = z3.Reals("next_with_new clear_with_new")
next_after_new, give_back = z3.Reals("next_after_new give_back")
ttft, tpot, credit = z3.Reals("ttft tpot credit")
running, waiting, kv_need, kv_quota, kv_lacks = z3.Ints("running waiting kv_need kv_quota kv_lacks")
# What happens.
took, begins, flight, before, lead = z3.Reals("took begins flight before lead")
held, later, delay, early = z3.Reals("held later delay early")
clearing, missed = z3.Reals("clearing missed")
first, last, arrival, started, whole = z3.Reals("first last arrival started whole")
endless = z3.Real("endless")
new, taken_next = z3.Bools("new taken_next")


class Case(NamedTuple):
    flight: bool
    """Serving has requests and a step in flight."""
    decode: bool
    """Some of them wait for their next token,"""
    first: bool
    """some for their first."""
    preempt: bool
    lacks: bool
    """A new request may find too little memory."""


CASES = [Case(False, False, False, *some) for some in product((False, True), repeat=2)]
CASES += [Case(True, *some) for some in product((False, True), repeat=4)]


def question(case: Case) -> admission.Question:
    facts = ServingFacts(
        written=Number(written),
        running=Number(running),
        waiting=Number(waiting),
        decode_deadline=Number(decode_due) if case.decode else NEVER,
        prefill_deadline=Number(first_due) if case.first else NEVER,
        next_step_s=Number(next_step),
        clear_s=Number(clear),
        next_step_with_new_s=Number(next_with_new),
        clear_with_new_s=Number(clear_with_new),
        next_step_after_new_s=Number(next_after_new),
        step_began=Number(step_began) if case.flight else 0.0,
        step_ends=Number(step_ends) if case.flight else 0.0,
        ttft_s=Number(ttft),
        tpot_s=Number(tpot),
        kv_need=Number(kv_need),
        kv_quota=Number(kv_quota),
        kv_lacks=Number(kv_lacks) if case.lacks else 0,
    )
    terms = admission.Terms("rose", Number(preempt) if case.preempt else None)
    more = {"worth_s": Number(worth), "busy_s": Number(busy), "give_back_s": Number(give_back)}
    return admission.Question(facts, terms, Number(now), occupied_s=Number(occupied), **more)


def premises(case: Case) -> z3.BoolRef:
    counts = (occupied, worth, busy, preempt, give_back, written, credit, running, waiting)
    bounds = (next_step, clear, next_after_new, kv_need, kv_quota)
    return z3.And(
        *(number >= 0 for number in (*counts, *bounds)),
        kv_lacks > 0,
        now > 0,
        ttft > 0,
        tpot > 0,
        next_step <= next_with_new,
        clear <= clear_with_new,
        z3.Or(running > 0, waiting > 0) == case.flight,
        step_began > 0,
        step_began <= now,
        step_began <= step_ends,
    )


class Grant(NamedTuple):
    condition: z3.BoolRef
    longest: z3.ArithRef
    """How long the rollout step holds serving up at most, as long as that has memory."""
    whole: z3.ArithRef
    """How long it takes at most."""
    in_time: z3.BoolRef
    """When it begins."""
    once: z3.BoolRef
    """The next step needs a new grant."""


def grants(case: Case) -> Iterator[Grant]:
    """Every way in which the rule grants a step."""
    for condition, window in paths(lambda: admission.window(question(case)), premises(case)):
        until, once = window.until, term(window.once)
        in_time = z3.And(now <= begins, begins <= until.term if isinstance(until, Number) else True)
        some = isinstance(window.seconds, Number)
        seconds = window.seconds.term if some else endless
        if some or window.seconds > 0:
            granted = z3.And(condition, seconds > 0) if some else condition
            yield Grant(granted, preempt if case.preempt else seconds, seconds, in_time, once)


def one_step(grant: Grant) -> z3.BoolRef:
    """That rollouts do with it."""
    return z3.And(grant.in_time, took <= grant.longest, whole <= grant.whole)


def course(case: Case, grant: Grant, rollouts: z3.BoolRef) -> z3.BoolRef:
    """What can happen after a grant."""
    fresh = z3.Or(written == 0, begins <= written + FACTS_S)
    facts_hold = z3.And(fresh, begins <= step_ends + occupied) if case.flight else fresh
    bound = z3.If(new, next_with_new, next_step)
    return z3.And(
        grant.condition,
        rollouts,
        *(number >= 0 for number in (took, before, held, later, early, clearing, missed)),
        early <= delay,
        delay <= took,
        took <= whole,
        z3.Or(z3.And(before == 0, lead == 0), lead >= tpot),
        step_began <= flight,
        flight <= step_ends + occupied,
        z3.Implies(
            facts_hold,
            z3.And(
                held <= bound,
                before + held <= bound + lead,
                z3.Implies(new, later <= next_after_new),
                clearing <= z3.If(new, clear_with_new, clear),
                missed <= next_step,
            ),
        ),
    )


def waits_for_memory() -> z3.BoolRef:
    """Some request that the facts know; nobody knows for how long."""
    return z3.And(waiting > 0, kv_need > kv_quota)


class Promise(NamedTuple):
    """When a token comes and when it is due, given some more."""

    at: z3.ArithRef
    due: z3.ArithRef
    given: z3.BoolRef


def next_tokens(case: Case) -> Promise | None:
    """(1) Running requests: the tightest deadline is at most theirs, each token moves it on."""
    token_before = z3.If(lead == 0, last, flight + before + early)
    given = z3.And(decode_due <= _due(first, last), last <= step_began)
    due = _due(first + lead, token_before)
    return Promise(flight + before + delay + held, due, given) if case.decode else None


def first_tokens(case: Case) -> Promise | None:
    """(2) Waiting requests."""
    return Promise(flight + delay + clearing, first_due, z3.BoolVal(True)) if case.first else None


def new_request(case: Case) -> Promise:
    """(3) One that the facts do not know."""
    return _new_request(case, delay)


def new_request_without_memory(case: Case) -> Promise | None:
    """(3) One that has to wait until the rollout step is over and memory is back."""
    return _new_request(case, whole + give_back) if case.lacks else None


def _new_request(case: Case, waits: z3.ArithRef) -> Promise:
    """The step after the one in flight takes it, or it misses a later one; if it comes during the
    rollout step, it has missed nothing."""
    taken = z3.And(step_began <= arrival, arrival <= flight + delay) if case.flight else False
    at = z3.If(taken_next, flight, arrival + missed) + waits + clearing
    return Promise(at, arrival + ttft, z3.And(new, z3.Implies(taken_next, taken)))


def second_tokens(case: Case) -> Promise | None:
    """(4) Waiting requests that get their first token just before the rollout step."""
    return _second_token(held, z3.BoolVal(True)) if case.first else None


def second_token_of_new_request(_: Case) -> Promise:
    """(4) The same of one that the facts do not know."""
    return _second_token(later, new)


OF_A_NEW_REQUEST = (new_request, new_request_without_memory, second_token_of_new_request)


def _second_token(step: z3.ArithRef, given: z3.BoolRef) -> Promise:
    return Promise(started + delay + step, _due(started, started), given)


def _due(first_token: z3.ArithRef, last_token: z3.ArithRef) -> z3.ArithRef:
    """The deadline after one token; any other number of them is a matter of `first_token`."""
    slo = Slo(Number(ttft), Number(tpot))
    times = Number(first_token), Number(last_token)
    return value(lambda: next_token_deadline(*times, 1, slo, Number(credit)))
