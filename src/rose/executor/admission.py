"""May the rollout engine take its next step? A pure function of serving's facts and the time.

The device runs one step at a time as far as deadlines are concerned: whatever a rollout step takes,
serving's next step may end that much later. Let `r` be the upper bound of the rollout step, `f`
what is left of serving's step in flight. The rule `rose` grants the step only if

    (1) decode    now + f + r + next serving step          <= tightest next-token deadline
    (2) prefill   now + f + r + until all waiting started  <= tightest first-token deadline
    (3) arrival         f + r + the same with one more     <= TTFT promise

where the serving bounds of (1) and (2) already contain a worst-case new request that arrives in the
middle of the rollout step. So slack is lent only when the next serving request provably fits. The
deadlines carry credit (see `slo`): a request that ran ahead of its pace lends the lead.

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

from rose.executor.facts import ServingFacts
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


def admit(facts: ServingFacts, want: Step, latency: LatencyBound, terms: Terms, now: float) -> Grant:
    return RULES[terms.rule](facts, want, latency, terms, now)


def _rose(
    facts: ServingFacts, want: Step, latency: LatencyBound, terms: Terms, now: float
) -> Grant:
    in_flight = max(0.0, facts.step_ends - now)
    slack = {
        Refusal.ARRIVAL: facts.ttft_s - in_flight - facts.clear_with_new_s,
        Refusal.DECODE: facts.decode_deadline - now - in_flight - facts.next_step_with_new_s,
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
    facts: ServingFacts, want: Step, latency: LatencyBound, terms: Terms, now: float
) -> Grant:
    """A step only while serving is empty, whatever its length."""
    return Grant(0, Refusal.BUSY) if facts.busy else _whole(want, latency)


def _paper_slack(
    facts: ServingFacts, want: Step, latency: LatencyBound, terms: Terms, now: float
) -> Grant:
    """ROSE as published: both slacks positive, no look at the rollout step's own length."""
    if facts.prefill_deadline - now - facts.clear_s <= 0:
        return Grant(0, Refusal.PREFILL)
    if facts.tight_decode_deadline - now - facts.next_step_s <= 0:
        return Grant(0, Refusal.DECODE)
    return _whole(want, latency)


def _share_all(
    facts: ServingFacts, want: Step, latency: LatencyBound, terms: Terms, now: float
) -> Grant:
    """No gate at all: the baseline that shows what is at stake."""
    return _whole(want, latency)


def _whole(want: Step, latency: LatencyBound) -> Grant:
    step = Step(min(want.prefill, CHUNK), want.decode, want.context)
    return Grant(step.tokens, None, latency.upper(step))


Rule = Callable[[ServingFacts, Step, LatencyBound, Terms, float], Grant]
RULES: dict[str, Rule] = {
    "rose": _rose,
    "idle_gate": _idle_gate,
    "paper_slack": _paper_slack,
    "share_all": _share_all,
}
