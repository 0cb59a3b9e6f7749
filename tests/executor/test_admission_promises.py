"""Does a granted rollout step ever break a serving promise? Admission against brute force.

The checker knows nothing of admission. It is a small device: one step runs at a time, none is cut
short, a step's true time is anything up to its bound; serving batches like vLLM (decodes first,
then prompts first come first served, within a token budget) and takes new requests only between its
steps. Part A grants one step in a random state and lets the worst happen. Part B runs a device for
a while. Part C breaks the rule in every way we know and wants each of them caught.

Two assumptions: of the requests that came while a rollout step was on the device, at most one has
not been shown yet, and a batch of decodes alone takes no longer than the promised pace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.executor import slo
from rose.executor.admission import Grant, Terms, admit
from rose.executor.bounds import Queue, bounds
from rose.executor.facts import NEVER, ServingFacts
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.slo import Slo

EPS = 1e-9
Seed = st.integers(0, 2**32 - 1)


@dataclass
class Request:
    arrival: float
    prompt: int
    outputs: int
    computed: int = 0
    emitted: int = 0
    first: float = 0.0
    last: float = 0.0
    tokens_at: list[float] = field(default_factory=list)

    def emit(self, now: float) -> None:
        self.first = self.first if self.emitted else now
        self.last = now
        self.emitted += 1
        self.tokens_at.append(now)


@dataclass
class Serving:
    """vLLM's batching, and what it tells the page."""

    latency: Tracker
    budget: int
    promise: Slo
    credit: float
    worst: int
    requests: list[Request] = field(default_factory=list)
    batch: list[Request] = field(default_factory=list)
    began: float = 0.0
    ends: float = 0.0

    def schedule(self, now: float) -> float:
        """Begin the next step; its bound, 0 when there is nothing to do."""
        room, prefill, decode, context = self.budget, 0, 0, 0
        order = sorted(self.requests, key=lambda r: r.emitted == 0)
        for request in order:
            missing = 1 if request.emitted else request.prompt - request.computed
            tokens = min(missing, room)
            if tokens:
                room -= tokens
                context += request.computed
                request.computed += tokens
                self.batch.append(request)
                decode += bool(request.emitted)
                prefill += 0 if request.emitted else tokens
        upper = self.latency.upper(Step(prefill, decode, context))
        self.began, self.ends = (now, now + upper) if self.batch else (0.0, 0.0)
        return upper

    def finish(self, now: float) -> None:
        for request in self.batch:
            if request.computed >= request.prompt:
                request.emit(now)
        self.batch = []
        self.began = self.ends = 0.0
        self.requests = [r for r in self.requests if r.emitted < r.outputs]

    def facts(self) -> ServingFacts:
        due = first_due = tight = NEVER
        decode = starting = prefill = context = 0
        for r in self.requests:
            context += r.computed
            if r.emitted:
                decode += 1
                due = min(
                    due,
                    slo.next_token_deadline(r.first, r.last, r.emitted, self.promise, self.credit),
                )
                tight = min(tight, r.last + self.promise.tpot_s)
            else:
                starting += 1
                prefill += r.prompt - r.computed
                first_due = min(first_due, slo.first_token_deadline(r.arrival, self.promise))
        here = Queue(decode, starting, prefill, context)
        next_step, clear = bounds(here, self.latency, self.budget, self.promise.tpot_s)
        next_with_new, clear_with_new = bounds(
            here.joined_by(self.worst), self.latency, self.budget, self.promise.tpot_s
        )
        return ServingFacts(
            running=decode,
            waiting=starting,
            decode_deadline=due,
            prefill_deadline=first_due,
            tight_decode_deadline=tight,
            next_step_s=next_step,
            clear_s=clear,
            next_step_with_new_s=next_with_new,
            clear_with_new_s=clear_with_new,
            step_began=self.began,
            step_ends=self.ends,
            ttft_s=self.promise.ttft_s,
            tpot_s=self.promise.tpot_s,
        )


@dataclass(frozen=True)
class Question:
    """One call of `admit`, for rules to answer, honest and broken."""

    facts: ServingFacts
    want: Step
    latency: Tracker
    terms: Terms
    now: float
    occupied: float


Rule = Callable[[Question], Grant]


def rose(q: Question) -> Grant:
    return admit(q.facts, q.want, q.latency, q.terms, q.now, q.occupied)


def line(rng: random.Random) -> Tracker:
    fixed = rng.choice([0.001, 0.01, 0.05])
    return Tracker(
        Profile(
            "m",
            "d",
            fixed_s=fixed,
            per_prefill_s=rng.choice([0.0001, 0.0005]),
            per_decode_s=rng.choice([0.0, 0.0005, 0.002]),
            per_context_s=rng.choice([0.0, 1e-6, 1e-5]),
            margin=rng.choice([1.02, 1.3]),
            error=0.0,
        )
    )


def true_time(rng: random.Random, upper: float) -> float:
    return upper * rng.choice([1.0, 1.0, 1.0, 0.01, 0.5, rng.random()])


def want(rng: random.Random) -> Step:
    decode = rng.choice([0, 1, 8])
    return Step(rng.choice([0, 16, 300, 2000]) if decode else 256, decode, 100 * decode)


# ---- Part A: one grant, then the worst


def random_serving(rng: random.Random, now: float) -> Serving:
    serving = Serving(
        line(rng),
        budget=rng.choice([64, 256, 1024]),
        promise=Slo(rng.choice([0.3, 1.0, 3.0]), rng.choice([0.05, 0.2, 1.0])),
        credit=rng.choice([0.0, 0.5, 2.0]),
        worst=rng.choice([16, 200, 900]),
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


def one_grant(seed: int, rule: Rule) -> list[str] | None:
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
    grant = rule(Question(facts, want(rng), rollout, terms, now, 0.0))
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
    serving.requests.append(new)
    clock = max(clock, new.arrival)
    while any(r.emitted == 0 for r, _ in owed) or not new.emitted or serving.batch:
        clock += true_time(rng, serving.schedule(clock))
        serving.finish(clock)
    first = new.first - new.arrival
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


# ---- Part B: a device over time


@dataclass
class Device:
    """A device over time: serving, a rollout engine that always wants more, and an adversary."""

    rng: random.Random
    rule: Rule
    serving: Serving
    rollout: Tracker
    terms: Terms
    now: float = 100.0
    jobs: list[tuple[str, float]] = field(default_factory=list)
    """What is on the device, in order: whose step, and its true seconds. The first one runs."""
    job_began: float = 0.0
    granted_at: float = 0.0
    used: list[tuple[float, float]] = field(default_factory=list)
    """When the rollout engine had a step on the device."""
    coming: Request | None = None
    hidden: Request | None = None
    seen: list[Request] = field(default_factory=list)
    grants: int = 0

    def run(self, asks: int) -> None:
        next_ask = self.now
        while asks or self.serving.requests or self.jobs or self.hidden:
            for act in self.rng.sample((self.serve, self.ask), 2):
                if act == self.serve:
                    self.serve()
                elif asks and self.now >= next_ask and self.ask():
                    asks -= 1
                    next_ask = self.now + self.rng.choice([0.0, 0.02, self.rng.random() * 0.1])
            times = [next_ask] if asks and next_ask > self.now else []
            times += [self.job_began + self.jobs[0][1]] if self.jobs else []
            times += [self.coming.arrival] if self.coming else []
            if not times:
                continue
            self.now = max(self.now, min(times))
            self.advance()

    def serve(self) -> None:
        if not self.serving.batch and (upper := self.serving.schedule(self.now)):
            self.submit("serving", true_time(self.rng, upper))

    def ask(self) -> bool:
        if any(owner == "rollout" for owner, _ in self.jobs):
            return False
        facts = self.serving.facts()
        occupied = sum(
            max(0.0, end - max(begin, facts.step_began)) for begin, end in self.used[-50:]
        )
        question = Question(facts, want(self.rng), self.rollout, self.terms, self.now, occupied)
        grant = self.rule(question)
        if grant.tokens:
            self.grants += 1
            self.granted_at = self.now
            # A preemptible step holds serving up for its preemption delay; the rest of it runs
            # when serving leaves the device idle and is nobody's problem.
            blocks = grant.upper_s if self.terms.preempt_s is None else self.terms.preempt_s
            self.submit("rollout", true_time(self.rng, blocks))
            if self.coming is None and self.hidden is None and self.rng.random() < 0.4:
                after = self.now + self.rng.choice([0.0, 1.0, self.rng.random()]) * grant.upper_s
                prompt = self.rng.choice(
                    [self.serving.worst, self.rng.randint(1, self.serving.worst)]
                )
                self.coming = Request(after, prompt, self.rng.choice([1, 2, 3, 20]))
        return True

    def submit(self, owner: str, seconds: float) -> None:
        if not self.jobs:
            self.job_began = self.now
        self.jobs.append((owner, seconds))

    def advance(self) -> None:
        done = bool(self.jobs) and self.now >= self.job_began + self.jobs[0][1]
        owner = self.jobs[0][0] if done else ""
        rollout_over = owner == "rollout"
        if self.coming and (self.now >= self.coming.arrival or rollout_over):
            self.coming.arrival = min(self.coming.arrival, self.now)
            self.hidden, self.coming = self.coming, None
        if done:
            self.jobs.pop(0)
            self.job_began = self.now
            if rollout_over:
                self.used.append((self.granted_at, self.now))
            else:
                self.serving.finish(self.now)
        if self.hidden and not self.serving.batch:
            self.serving.requests.append(self.hidden)
            self.seen.append(self.hidden)
            self.hidden = None


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
    device = Device(rng, rule, serving, line(rng), terms)
    device.run(asks=60)
    broken = []
    for r in device.seen:
        if r.first - r.arrival > serving.promise.ttft_s + EPS:
            broken.append(f"first token after {r.first - r.arrival} of {serving.promise.ttft_s}")
        if r.outputs > 1 and (r.last - r.first) / (r.outputs - 1) > tpot + EPS:
            broken.append(f"pace {(r.last - r.first) / (r.outputs - 1)} of {tpot}")
    return device.grants, broken


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

    def prefill_within(self, seconds: float, decode: int, context: int) -> int:
        return 1 << 30 if seconds >= 0 else 0

    def upper(self, step: Step) -> float:
        return 0.0


def without_arrival(q: Question) -> Grant:
    return rose(_with(q, ttft_s=math.inf))


def without_decode(q: Question) -> Grant:
    return rose(_with(q, decode_deadline=NEVER))


def without_prefill(q: Question) -> Grant:
    waiting = q.facts.prefill_deadline < NEVER
    return rose(_with(q, prefill_deadline=1e300 if waiting else NEVER))


def without_start(q: Question) -> Grant:
    return rose(_with(q, tpot_s=math.inf))


def without_new_request(q: Question) -> Grant:
    here = q.facts
    return rose(_with(q, clear_with_new_s=here.clear_s, next_step_with_new_s=here.next_step_s))


def without_unseen(q: Question) -> Grant:
    return rose(_with(q, step_began=q.now, next_step_s=0.0))


def without_occupied(q: Question) -> Grant:
    return rose(Question(q.facts, q.want, q.latency, q.terms, q.now, 0.0))


def without_step_in_flight(q: Question) -> Grant:
    return rose(_with(q, step_ends=0.0))


def without_rollout_time(q: Question) -> Grant:
    grant = rose(Question(q.facts, q.want, Free(q.latency), q.terms, q.now, q.occupied))
    step = Step(min(q.want.prefill, 512), q.want.decode, q.want.context)
    return Grant(grant.tokens, grant.refusal, q.latency.upper(step))


def with_half_the_bound(q: Question) -> Grant:
    return rose(
        _with(
            q,
            clear_with_new_s=q.facts.clear_with_new_s / 2,
            next_step_with_new_s=q.facts.next_step_with_new_s / 2,
        )
    )


def _with(q: Question, **changes: float) -> Question:
    return Question(replace(q.facts, **changes), q.want, q.latency, q.terms, q.now, q.occupied)


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
    monkeypatch.setitem(globals(), "bounds", one_step_for_all)
    assert any(whole_run(seed, rose)[1] for seed in range(3000))
