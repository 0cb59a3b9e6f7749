"""One pattern, simulated lent and alone on the same arrivals: what lending added.

What admission guarantees (docs/proof.md), with `r` the longest rollout step that it granted: beside
at most one request that it has not seen, a request's first token comes

    within (1 - margin) of the TTFT promise, or at most r later than alone

because a rollout step is granted only if the first holds for all requests that are here and for one
new one, and what has begun before delays serving once, by no more than itself. So do later tokens:
on pace, or all together at most r later. With two or more unseen requests there is no such promise:
a request that alone would have been computed at once may share a step with those that came within
r, and wait for their prompts too. An error budget lets steps be longer than that for a share of the
requests in expectation, over arrivals that do not aim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from rose.executor.latency import Step
from rose.executor.slo import Slo
from rose.plan.job import alone, simulate
from rose.plan.outcome import Outcome
from rose.plan.scenario import Scenario
from rose.plan.stress.pattern import Moments, Pattern, arrivals, background, moments, worst_prompt
from rose.plan.system import System
from rose.plan.workload.traffic import Traffic

ROUNDING_S = 1e-6
CALM_S = 4_000.0
"""Of usual traffic: longer than two steps of a reduced fleet."""


@dataclass(frozen=True)
class Hurt:
    """What a pattern did. Excess: over serving alone, of the request that has most of it."""

    requests: int
    late_alone: int
    late_lent: int
    added_late: int
    """Late lent, and not alone."""
    ttft_excess_s: float
    tpot_excess_s: float
    step_s: float
    """The longest rollout step granted; with preemption its delay."""
    late_expected: float
    """What the error budget was charged."""
    single: int
    """Requests beside which at most one was unseen at any time, and none longer than expected."""
    single_excess_s: float
    single_beyond: int
    """Of those, beyond what is guaranteed."""
    several_beyond: int
    """Of the others, beyond what would be for one."""

    def score(self, slo: Slo) -> float:
        """Percent late through lending, and excess in terms of the promise where none is late."""
        late = 100.0 * self.added_late / self.requests if self.requests else 0.0
        return late + self.ttft_excess_s / slo.ttft_s + self.tpot_excess_s / slo.tpot_s

    @property
    def within(self) -> str:
        """Whether what is guaranteed held; if not, what was the matter."""
        if self.single_beyond:
            return "BROKEN"
        return "several unseen" if self.several_beyond else "yes"


class Bench:
    """Tries patterns on one fleet."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._calm = cache(self._moments)

    def trial(self, pattern: Pattern, system: System, timed_by: System | None = None) -> Hurt:
        """`timed_by`: whose calm run the burst aims at, to try the same arrivals on others."""
        when = self._calm(timed_by or system, pattern.background)
        given = arrivals(pattern, when, self.scenario)
        crowd = replace(self.scenario, arrivals=given)
        lent = simulate(crowd, system)
        seconds = max(float(t.arrival_s[-1]) for t in given if len(t)) + crowd.rest_s
        return compare(crowd, given, lent, alone(crowd, seconds))

    def _moments(self, system: System, share: float) -> Moments:
        given = background(self.scenario, share, CALM_S)
        return moments(simulate(replace(self.scenario, arrivals=given), system))


def compare(scenario: Scenario, given: tuple[Traffic, ...], lent: Outcome, quiet: Outcome) -> Hurt:
    """Both have all requests, in order of arrival."""
    slo, margin = scenario.serving.slo, scenario.serving.slo_margin
    arrival, output, device = _merged(given)
    if not len(lent.ttft) == len(quiet.ttft) == len(arrival):
        raise ValueError("requests are left when the run ends: `rest_s` is too short")
    more = np.maximum(1, output - 1)
    ttft, tpot = lent.ttft - quiet.ttft, lent.tpot - quiet.tpot
    step_s = lent.longest_s + ROUNDING_S
    kept, on_pace = (1.0 - margin) * slo.ttft_s, (1.0 - margin) * slo.tpot_s
    beyond = (ttft > step_s) & (lent.ttft > kept)
    beyond |= (tpot * more > step_s) & (lent.tpot > on_pace)
    single = _single(scenario, given, device, lent, step_s)
    late_lent, late_alone = _late(lent, slo), _late(quiet, slo)
    return Hurt(
        requests=len(arrival),
        late_alone=int(late_alone.sum()),
        late_lent=int(late_lent.sum()),
        added_late=int((late_lent & ~late_alone).sum()),
        ttft_excess_s=float(np.max(ttft, initial=0.0)),
        tpot_excess_s=float(np.max(tpot, initial=0.0)),
        step_s=lent.longest_s,
        late_expected=lent.late_expected,
        single=int(single.sum()),
        single_excess_s=float(np.max(ttft[single], initial=0.0)),
        single_beyond=int((beyond & single).sum()),
        several_beyond=int((beyond & ~single).sum()),
    )


def _late(one: Outcome, slo: Slo) -> np.ndarray:
    late: np.ndarray = (one.ttft > slo.ttft_s) | (one.tpot > slo.tpot_s)
    return late


def _merged(given: tuple[Traffic, ...]) -> tuple[np.ndarray, ...]:
    """Arrival, output and device of all requests, by arrival."""
    arrival = np.concatenate([t.arrival_s for t in given])
    output = np.concatenate([t.output for t in given])
    device = np.repeat(np.arange(len(given)), [len(t) for t in given])
    order = np.argsort(arrival, kind="stable")
    return arrival[order], output[order], device[order]


def _single(
    scenario: Scenario, given: tuple[Traffic, ...], device: np.ndarray, lent: Outcome, step_s: float
) -> np.ndarray:
    """From a rollout step and a serving step before a request came until it ended, no two came to
    its device closer than that, and none with a longer prompt than admission expects; and it did
    not find one there of whom this is not so."""
    engine = scenario.serving.engine
    unseen_s = step_s + engine.latency.upper(Step(engine.budget, 0, engine.budget))
    longest = worst_prompt(scenario)
    single = np.ones(len(device), bool)
    for one, traffic in enumerate(given):
        mine = np.flatnonzero(device == one)
        came = traffic.arrival_s
        close = np.diff(came, prepend=-np.inf) <= unseen_s
        bad = came[close | (traffic.prompt > longest)]
        ended = came + lent.ttft[mine] + lent.tpot[mine] * np.maximum(0, traffic.output - 1)
        within = (bad >= came[:, None] - unseen_s) & (bad <= ended[:, None])
        single[mine] = ~within.any(axis=1)
        until = -math.inf
        for request, comes, ends in zip(mine, came, ended, strict=True):
            single[request] &= comes > until
            if not single[request]:
                until = max(until, ends)
    return single
