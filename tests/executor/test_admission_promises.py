"""Does a granted rollout step ever break a serving promise? Admission against brute force.

The checker is the small device of `device.py`. Part A grants one step in a random state and lets
the worst happen. Part B runs a device for a while. Part C breaks the rule in every way we know and
wants each of them caught.

Two assumptions: of the requests that came while a rollout step was on the device, at most one has
not been shown yet, and a batch of decodes alone takes no longer than the promised pace.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.executor import device
from tests.executor.device import (
    Ask,
    Device,
    Grant,
    Request,
    Rule,
    Serving,
    line,
    rose,
    true_time,
    want,
)

from rose.executor import slo
from rose.executor.admission import Terms
from rose.executor.bounds import Queue, bounds
from rose.executor.facts import NEVER
from rose.executor.latency import Fit, Step, Tracker
from rose.executor.slo import Slo

EPS = 1e-9
Seed = st.integers(0, 2**32 - 1)


# ---- Part A: one grant, then the worst


def random_serving(rng: random.Random, now: float) -> Serving:
    serving = Serving(
        line(rng),
        budget=rng.choice([64, 256, 1024]),
        promise=Slo(rng.choice([0.3, 1.0, 3.0]), rng.choice([0.05, 0.2, 1.0])),
        credit=rng.choice([0.0, 0.5, 2.0]),
        worst=rng.choice([16, 200, 900]),
        rate=1.0,
    )
    for _ in range(rng.choice([0, 0, 1, 3, 12])):
        emitted = rng.randint(1, 20)
        last = now - rng.random() * 0.2
        pace = serving.promise.tpot_s * rng.choice([0.2, 0.5, 1.0, 1.1])
        first = last - (emitted - 1) * pace
        prompt = rng.randint(1, 500)
        serving.requests.append(
            Request(first - 0.1, prompt, 100, prompt + emitted - 1, emitted, first, last)
        )
    for _ in range(rng.choice([0, 0, 1, 3])):
        prompt = rng.randint(1, 400)
        computed = rng.choice([0, 0, rng.randint(0, prompt - 1)])
        waited = serving.promise.ttft_s * rng.choice([0.1, 0.9]) * rng.random()
        serving.requests.append(Request(now - waited, prompt, 100, computed))
    return serving


def one_grant(seed: int, rule: Rule, somebody_comes: bool = True) -> list[str] | None:
    """What went wrong after a grant in a random state; None when the step was refused."""
    rng = random.Random(seed)
    now = 100.0
    serving = random_serving(rng, now)
    terms = Terms(preempt_s=rng.choice([None, None, 0.002]))
    rollout = line(rng)
    flight_ends = now
    if serving.requests and rng.random() < 0.5:
        began = now - rng.random() * 0.1
        upper = serving.schedule(began)
        flight_ends = max(now, began + true_time(rng, upper))
    facts = serving.facts()
    grant = rule(Ask(facts, want(rng), rollout, terms, now, 0.0))
    if not grant.tokens:
        return None
    owed = [
        (
            r,
            slo.next_token_deadline(r.first, r.last, r.emitted, serving.promise, serving.credit)
            if r.emitted
            else r.arrival + serving.promise.ttft_s,
        )
        for r in serving.requests
    ]
    blocking = grant.upper_s if terms.preempt_s is None else terms.preempt_s
    blocking = true_time(rng, blocking)
    in_flight = bool(serving.batch)
    unseen_since = serving.began if in_flight else now
    new = Request(
        unseen_since
        + rng.choice([0.0, 1.0, rng.random()]) * (flight_ends + blocking - unseen_since),
        rng.choice([serving.worst, serving.worst, rng.randint(1, serving.worst)]),
        100,
    )
    if in_flight:
        serving.finish(flight_ends)
    clock = flight_ends
    # Without a step in flight serving may begin one before the rollout step reaches the device.
    if not in_flight and rng.random() < 0.3 and (upper := serving.schedule(clock)):
        clock += true_time(rng, upper)
        serving.finish(clock)
    clock += blocking
    everyone = [r for r, _ in owed]
    if somebody_comes:
        everyone.append(new)
        serving.requests.append(new)
        clock = max(clock, new.arrival)
    while any(not r.tokens_at for r in everyone):
        clock += true_time(rng, serving.schedule(clock))
        serving.finish(clock)
    first = new.first - new.arrival if somebody_comes else 0.0
    broken = [f"new request waited {first}"] if first > serving.promise.ttft_s + EPS else []
    return broken + [
        f"token at {r.tokens_at[0]}, due {due}" for r, due in owed if r.tokens_at[0] > due + EPS
    ]


@settings(max_examples=1500)
@given(Seed)
def test_a_granted_step_breaks_no_promise(seed: int) -> None:
    assert not one_grant(seed, rose)


def test_the_random_states_are_granted_often_enough_to_mean_something() -> None:
    outcomes = [one_grant(seed, rose) for seed in range(2000)]
    assert sum(outcome is not None for outcome in outcomes) > 300


def rich(q: Ask) -> Grant:
    return rose(q._replace(allowance=1e9, terms=Terms(error_budget=1.0)))


@settings(max_examples=1000)
@given(Seed)
def test_no_budget_buys_the_deadlines_of_those_present(seed: int) -> None:
    assert not one_grant(seed, rich, somebody_comes=False)


def test_a_budget_grants_in_more_states_and_not_without_risk() -> None:
    granted = [sum(one_grant(s, r) is not None for s in range(1000)) for r in (rose, rich)]
    assert granted[1] > 1.2 * granted[0]
    assert any(one_grant(seed, rich) for seed in range(1000))


# ---- Part B: a device over time


def whole_run(seed: int, rule: Rule) -> tuple[int, list[str]]:
    """Grants given and promises broken in one random run."""
    rng = random.Random(seed)
    latency = line(rng)
    tpot = latency.upper(Step(0, 40, 40 * 1000)) * rng.choice([1.05, 1.5, 4.0])
    budget, worst = rng.choice([64, 256, 1024]), rng.choice([16, 200, 900])
    alone = bounds(Queue(0, 1, worst, 0), latency, budget, tpot)[1]
    serving = Serving(
        latency,
        budget,
        promise=Slo(alone * rng.choice([1.5, 3.0, 10.0]), tpot),
        credit=rng.choice([0.0, 0.5, 2.0]),
        worst=worst,
    )
    terms = Terms(preempt_s=rng.choice([None, None, None, 0.002]))
    shared = Device(rng, rule, serving, line(rng), terms)
    shared.run(asks=60)
    broken = []
    for r in shared.seen:
        if r.first - r.arrival > serving.promise.ttft_s + EPS:
            broken.append(f"first token after {r.first - r.arrival} of {serving.promise.ttft_s}")
        if r.outputs > 1 and (r.last - r.first) / (r.outputs - 1) > tpot + EPS:
            broken.append(f"pace {(r.last - r.first) / (r.outputs - 1)} of {tpot}")
    return shared.grants, broken


@settings(max_examples=400)
@given(Seed)
def test_every_promise_is_kept_over_a_whole_run(seed: int) -> None:
    assert whole_run(seed, rose)[1] == []


def test_the_random_runs_grant_and_serve() -> None:
    grants = [whole_run(seed, rose)[0] for seed in range(100)]
    assert sum(grants) > 1000


# ---- Part C: the checker catches every rule that is broken


class Free(Tracker):
    """Says that a rollout step takes no time; the device knows better."""

    def __init__(self, honest: Tracker) -> None:
        super().__init__(honest.profile)

    def within(self, seconds: float, context: int) -> Fit:
        return Fit(math.inf if seconds > 0 else -1.0, 0.0)

    def upper(self, step: Step) -> float:
        return 0.0


def without_arrival(q: Ask) -> Grant:
    return rose(_with(q, ttft_s=math.inf))


def without_decode(q: Ask) -> Grant:
    return rose(_with(q, decode_deadline=NEVER))


def without_prefill(q: Ask) -> Grant:
    waiting = q.facts.prefill_deadline < NEVER
    return rose(_with(q, prefill_deadline=1e300 if waiting else NEVER))


def without_start(q: Ask) -> Grant:
    return rose(_with(q, tpot_s=math.inf))


def without_new_request(q: Ask) -> Grant:
    here = q.facts
    return rose(_with(q, clear_with_new_s=here.clear_s, next_step_with_new_s=here.next_step_s))


def without_unseen(q: Ask) -> Grant:
    return rose(_with(q, step_began=q.now, next_step_s=0.0))


def without_occupied(q: Ask) -> Grant:
    return rose(q._replace(occupied_s=0.0))


def without_step_in_flight(q: Ask) -> Grant:
    return rose(_with(q, step_ends=0.0))


def without_rollout_time(q: Ask) -> Grant:
    grant = rose(q._replace(latency=Free(q.latency)))
    step = Step(min(q.want.prefill, 512), q.want.decode, q.want.context)
    return Grant(grant.tokens, grant.refusal, q.latency.upper(step))


def with_half_the_bound(q: Ask) -> Grant:
    return rose(
        _with(
            q,
            clear_with_new_s=q.facts.clear_with_new_s / 2,
            next_step_with_new_s=q.facts.next_step_with_new_s / 2,
        )
    )


def _with(q: Ask, **changes: float) -> Ask:
    return q._replace(facts=replace(q.facts, **changes))


@pytest.mark.parametrize(
    "broken",
    [
        without_arrival,
        without_decode,
        without_prefill,
        without_start,
        without_new_request,
        without_unseen,
        without_occupied,
        without_step_in_flight,
        without_rollout_time,
        with_half_the_bound,
    ],
)
def test_a_broken_rule_is_caught(broken: Rule) -> None:
    assert any(whole_run(seed, broken)[1] or one_grant(seed, broken) for seed in range(3000))


def one_step_for_all(queue: Queue, latency: Tracker, budget: int, _: float) -> tuple[float, float]:
    """Bounds that forget what starting requests cost the steps after their first token."""
    room = max(1, budget - queue.decode)
    if queue.prefill <= room:
        return (latency.upper(Step(queue.prefill, queue.decode, queue.context)),) * 2
    full = latency.upper(Step(room, queue.decode, queue.context + queue.prefill))
    chunks, rest = divmod(queue.prefill, room)
    tail = latency.upper(Step(rest, queue.decode, queue.context + queue.prefill))
    return full, chunks * full + tail


def test_bounds_that_are_too_small_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "bounds", one_step_for_all)
    assert any(whole_run(seed, rose)[1] for seed in range(3000))
