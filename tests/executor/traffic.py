"""Poisson traffic on the device of `device.py`, with a rollout engine that always wants more.

Steps queue first come first served on the device. Requests come whether or not anything is lent, so
two runs of the same traffic, one without lending, tell which requests lending made late.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from tests.executor.device import Ask, Grant, Request, Rule, Serving

from rose.executor.admission import NEW, Refusal, Terms
from rose.executor.budget import FIRST_REQUESTS, ErrorBudget
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.slo import Slo

EPS = 1e-9


@dataclass(frozen=True)
class Traffic:
    """Requests and what they are promised."""

    rate: float
    promise: Slo
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """The longest prompts of the classes of `admission.NEW`."""
    guarded: int = 1 << 20
    """Longest prompt that the worst-case new request may have."""
    outputs: tuple[int, ...] = (1,)
    credit: float = 0.0
    exact: bool = True
    """Prompts are as long as the largest of their size, not of any length in between."""
    true: float = 1.0
    """Least true time of a step, as a share of its bound."""
    latency: Tracker = field(
        default_factory=lambda: Tracker(
            Profile("m", "d", 0.01, 0.0001, 0.0002, 0.0, margin=1.02, error=0.0)
        )
    )

    @property
    def middles(self) -> tuple[int, ...]:
        if self.exact:
            return self.sizes
        return tuple((a + b) // 2 for a, b in pairwise((0, *self.sizes)))

    def draw(self, rng: random.Random, requests: int) -> list[Request]:
        drawn, now = [], 100.0
        for _ in range(requests):
            now += rng.expovariate(self.rate)
            size = rng.choices(range(len(NEW)), [share for share, _, _ in NEW])[0]
            least = self.sizes[size] if self.exact else ([0, *self.sizes][size] + 1)
            prompt = rng.randint(least, self.sizes[size])
            drawn.append(Request(now, prompt, rng.choice(self.outputs)))
        return drawn


@dataclass
class Outcome:
    tokens: int = 0
    grants: int = 0
    risk: float = 0.0
    earned: float = 0.0
    late: set[int] = field(default_factory=set)


def refuse(_: Ask) -> Grant:
    return Grant(0, Refusal.STATE)


def run(
    traffic: Traffic, seed: int, requests: int, rule: Rule, terms: Terms, want: Step
) -> Outcome:
    rng = random.Random(seed)
    everyone = traffic.draw(rng, requests)
    coming = deque(everyone)
    serving = Serving(
        traffic.latency,
        budget=2048,
        promise=traffic.promise,
        credit=traffic.credit,
        worst=min(traffic.sizes[4], traffic.guarded),
        sizes=traffic.middles,
        rate=traffic.rate,
    )
    budget, outcome = ErrorBudget(terms.error_budget), Outcome()
    budget.earn(0)
    idle = serving.facts()
    jobs: deque[tuple[str, float]] = deque()
    used: deque[tuple[float, float]] = deque(maxlen=8)
    now, head_ends, granted_at = 100.0, 0.0, 0.0
    while coming or serving.requests or jobs:
        if not serving.batch:
            while coming and coming[0].arrival <= now:
                serving.requests.append(coming.popleft())
                serving.arrived += 1
            if serving.requests:
                upper = serving.schedule(now)
                jobs.append(("serving", upper * rng.uniform(traffic.true, 1.0)))
                head_ends = now + jobs[0][1] if len(jobs) == 1 else head_ends
        if coming and not any(owner == "rollout" for owner, _ in jobs):
            facts = serving.facts() if serving.requests else idle
            budget.earn(serving.arrived)
            occupied = sum(max(0.0, end - max(begin, facts.step_began)) for begin, end in used)
            grant = rule(Ask(facts, want, traffic.latency, terms, now, occupied, budget.left))
            if grant.tokens:
                budget.spend(grant.risk)
                outcome.risk += grant.risk
                outcome.tokens += grant.tokens
                outcome.grants += 1
                granted_at = now
                jobs.append(("rollout", grant.upper_s * rng.uniform(traffic.true, 1.0)))
                head_ends = now + jobs[0][1] if len(jobs) == 1 else head_ends
        ends = head_ends if jobs else float("inf")
        arrives = coming[0].arrival if coming and not serving.batch else float("inf")
        now = min(ends, arrives)
        if now == ends and jobs:
            owner, _ = jobs.popleft()
            head_ends = now + jobs[0][1] if jobs else 0.0
            if owner == "rollout":
                used.append((granted_at, now))
            else:
                serving.finish(now)
    outcome.earned = terms.error_budget * (requests + FIRST_REQUESTS)
    for index, r in enumerate(everyone):
        behind = r.outputs > 1 and r.last - r.first > traffic.promise.tpot_s * (r.outputs - 1) + EPS
        if r.first - r.arrival > traffic.promise.ttft_s + EPS or behind:
            outcome.late.add(index)
    return outcome
