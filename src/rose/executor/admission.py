"""May the rollout engine take its next step? A pure function of serving's facts and the time.

The device runs one step at a time as far as deadlines are concerned: whatever a rollout step takes,
serving's next step may end that much later. Let `r` be the upper bound of the rollout step, `f`
what is left of serving's step in flight. The rule `rose` grants the step only if

    (1) decode    now + f + r + next serving step          <= tightest next-token deadline
    (2) prefill   now + f + r + until all waiting started  <= tightest first-token deadline
    (3) arrival         u + r + the same with one more     <= TTFT promise
    (4) start             r + next serving step            <= TPOT promise, if any is waiting

where the serving bounds already contain a worst-case new request that arrives in the middle of the
rollout step. So slack is lent only when the next serving request provably fits. The deadlines carry
credit (see `slo`): a request that ran ahead of its pace lends the lead. (4) is for a request whose
first token comes just before the rollout step: it has no deadline yet and no lead.

`u` is the longest that a new request may wait unseen: a serving engine takes new ones only between
its steps, so one may have come just after the step in flight began, or may just miss the next one.
And `f` counts from the promised end of the step in flight, later by what the rollout engine itself
has taken from the device since that step began.

Two variants. With sub-step preemption (CPU: SCHED_IDLE) serving overtakes a rollout step already
begun, so `r` is the measured preemption delay; a step begun while serving computes would only crawl
and waste cache, so it is not begun. Without preemption (`preempt_s=None`, a GPU today) the whole
rollout step blocks, the step's tokens are cut to what fits, and time between serving steps is lent
too when the conditions allow the entire decode batch (half a batch costs the device nearly as much
as a whole one).

`idle_gate` and `paper_slack` are there to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rose.executor.facts import NEVER, ServingFacts
from rose.executor.latency import Step

CHUNK = 512
"""Rollout prefill tokens per step at most, as in the paper: bounds the longest rollout step."""


class Refusal(StrEnum):
    """Why a step was not granted."""

    BUSY = "busy"
    """Serving computes now; a preemptible step would only crawl, an idle gate stays shut."""
    DECODE = "decode"
    """A running serving request would miss its next-token deadline."""
    PREFILL = "prefill"
    """A waiting serving request would miss its first-token deadline."""
    ARRIVAL = "arrival"
    """A worst-case new serving request would miss its first-token deadline."""
    PAGE = "page"
    """Serving's half of the page cannot be read or believed."""
    STATE = "state"
    """The rollout engine is not active (dormant, or without memory)."""


class LatencyBound(Protocol):
    def upper(self, step: Step) -> float: ...
    def prefill_within(self, seconds: float, decode: int, context: int) -> int: ...


@dataclass(frozen=True)
class Grant:
    """What the rollout engine may do in its next step; no tokens means wait for serving's bell."""

    tokens: int
    refusal: Refusal | None = None
    upper_s: float = 0.0


@dataclass(frozen=True)
class Terms:
    """How a device lends its compute."""

    rule: str = "rose"
    preempt_s: float | None = None
    """Measured delay until serving overtakes a running rollout step; None when it cannot."""


def admit(
    facts: ServingFacts,
    want: Step,
    latency: LatencyBound,
    terms: Terms,
    now: float,
    occupied_s: float = 0.0,
) -> Grant:
    """`occupied_s`: time the rollout engine has had steps on the device since `step_began`."""
    return RULES[terms.rule](facts, want, latency, terms, now, occupied_s)


def _rose(
    facts: ServingFacts,
    want: Step,
    latency: LatencyBound,
    terms: Terms,
    now: float,
    occupied_s: float,
) -> Grant:
    in_flight, unseen = 0.0, facts.next_step_s
    if facts.step_ends:
        in_flight = max(0.0, facts.step_ends + occupied_s - now)
        unseen = max(unseen, now - facts.step_began + in_flight)
    until_due = facts.decode_deadline - now - in_flight
    if facts.prefill_deadline < NEVER:
        until_due = min(until_due, facts.tpot_s)
    slack = {
        Refusal.ARRIVAL: facts.ttft_s - unseen - facts.clear_with_new_s,
        Refusal.DECODE: until_due - facts.next_step_with_new_s,
        Refusal.PREFILL: facts.prefill_deadline - now - in_flight - facts.clear_with_new_s,
    }
    binding = min(slack, key=lambda reason: slack[reason])
    if terms.preempt_s is not None:
        if facts.busy:
            return Grant(0, Refusal.BUSY)
        if slack[binding] < terms.preempt_s:
            return Grant(0, binding)
        return _whole(want, latency)

    fits = latency.prefill_within(slack[binding], want.decode, want.context)
    prefill = min(fits, want.prefill, CHUNK)
    if want.prefill and not prefill and not want.decode:
        return Grant(0, binding)
    step = Step(prefill, want.decode, want.context)
    upper = latency.upper(step)
    if upper > slack[binding]:
        return Grant(0, binding)
    return Grant(step.tokens, None, upper)


def _idle_gate(
    facts: ServingFacts,
    want: Step,
    latency: LatencyBound,
    terms: Terms,
    now: float,
    occupied_s: float,
) -> Grant:
    """A step only while serving is empty, whatever its length."""
    return Grant(0, Refusal.BUSY) if facts.busy else _whole(want, latency)


def _paper_slack(
    facts: ServingFacts,
    want: Step,
    latency: LatencyBound,
    terms: Terms,
    now: float,
    occupied_s: float,
) -> Grant:
    """ROSE as published: both slacks positive, no look at the rollout step's own length."""
    if facts.prefill_deadline - now - facts.clear_s <= 0:
        return Grant(0, Refusal.PREFILL)
    if facts.tight_decode_deadline - now - facts.next_step_s <= 0:
        return Grant(0, Refusal.DECODE)
    return _whole(want, latency)


def _share_all(
    facts: ServingFacts,
    want: Step,
    latency: LatencyBound,
    terms: Terms,
    now: float,
    occupied_s: float,
) -> Grant:
    """No gate at all: the baseline that shows what is at stake."""
    return _whole(want, latency)


def _static_split(
    facts: ServingFacts,
    want: Step,
    latency: LatencyBound,
    terms: Terms,
    now: float,
    occupied_s: float,
) -> Grant:
    """Fixed time slices: half of every second is rollout's, whatever serving does."""
    return _whole(want, latency) if now % 1.0 < 0.5 else Grant(0, Refusal.BUSY)


def _whole(want: Step, latency: LatencyBound) -> Grant:
    step = Step(min(want.prefill, CHUNK), want.decode, want.context)
    return Grant(step.tokens, None, latency.upper(step))


Rule = Callable[[ServingFacts, Step, LatencyBound, Terms, float, float], Grant]
RULES: dict[str, Rule] = {
    "rose": _rose,
    "idle_gate": _idle_gate,
    "paper_slack": _paper_slack,
    "share_all": _share_all,
    "static_split": _static_split,
}
