"""A small device that knows nothing of admission, for rules to be tried on.

One step runs at a time, none is cut short, a step's true time is anything up to its bound; serving
batches like vLLM (decodes first, then prompts first come first served, within a token budget) and
takes new requests only between its steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rose.executor import admission, slo
from rose.executor.admission import CHUNK, NEW, Question, Refusal, Terms
from rose.executor.bounds import Queue, bounds
from rose.executor.facts import NEVER, ServingFacts
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.slo import Slo


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
    sizes: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Prompts in the middle of the classes of `admission.NEW`."""
    rate: float = 0.0
    arrived: int = 0
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
        *new, worst = (
            bounds(here.joined_by(prompt), self.latency, self.budget, self.promise.tpot_s)
            for prompt in (*self.sizes, self.worst)
        )
        joined = Queue(decode + 1, starting, prefill, context + self.worst)
        next_after, _ = bounds(joined, self.latency, self.budget, self.promise.tpot_s)
        likely = {}
        for (_, next_name, clear_name), times in zip(NEW, new, strict=True):
            likely[next_name], likely[clear_name] = times
        return ServingFacts(
            running=decode,
            waiting=starting,
            decode_deadline=due,
            prefill_deadline=first_due,
            tight_decode_deadline=tight,
            next_step_s=next_step,
            clear_s=clear,
            next_step_with_new_s=worst[0],
            clear_with_new_s=worst[1],
            next_step_after_new_s=next_after,
            base_s=self.latency.upper(Step(1, decode, context)),
            arrived=self.arrived,
            arrival_rate=self.rate,
            step_began=self.began,
            step_ends=self.ends,
            ttft_s=self.promise.ttft_s,
            tpot_s=self.promise.tpot_s,
            **likely,
        )


@dataclass(frozen=True)
class Grant:
    """What the rollout engine does in its next step."""

    tokens: int
    refusal: Refusal | None = None
    upper_s: float = 0.0
    risk: float = 0.0
    until: float = math.inf


class Ask(NamedTuple):
    """A step the rollout engine would like to take."""

    facts: ServingFacts
    want: Step
    latency: Tracker
    terms: Terms
    now: float
    occupied_s: float = 0.0
    allowance: float = 0.0


Rule = Callable[[Ask], Grant]


def rose(ask: Ask) -> Grant:
    """As the rollout engine does: a window by the rule of the terms, and a step that fits it."""
    want = ask.want
    window = admission.window(
        Question(ask.facts, ask.terms, ask.now, ask.occupied_s, ask.allowance)
    )
    fit = ask.latency.within(window.seconds, want.context)
    tokens = fit.tokens(want.decode, min(want.prefill, CHUNK))
    if not tokens:
        return Grant(0, window.binding)
    decode = min(tokens, want.decode)
    upper = ask.latency.upper(Step(tokens - decode, decode, want.context))
    return Grant(tokens, None, upper, window.risk(upper), window.until)


def admit(facts: ServingFacts, want: Step, latency: Tracker, *more: Any, **named: Any) -> Grant:
    return rose(Ask(facts, want, latency, *more, **named))


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
        question = Ask(facts, want(self.rng), self.rollout, self.terms, self.now, occupied)
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
