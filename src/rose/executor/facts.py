"""What the processes of a device tell each other on the page. Plain numbers, one writer each.

`ServingFacts` by the serving engine, `RolloutFacts` by the rollout engine, `NodeOrders` by the node
agent. Times are seconds of CLOCK_MONOTONIC (shared by all processes of a host), sizes are bytes.
`implausible` is what stands between a lying or corrupted half and a decision based on it.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import cache

import msgspec

NEVER = math.inf
"""Deadline of a request that does not exist."""

FACTS_S = 0.5
"""The facts period: serving repeats its facts several times in it, also when idle. Older ones mean
that it can no longer write the page, and say nothing of what it does now."""

MAX_SECONDS = 3600.0
"""Longer predictions are published as an hour; a larger number on the page is a lie or garbage."""

MAX_BYTES = 1 << 50
"""No device holds a pebibyte of KV; a larger number is a lie or garbage."""


class LeaseState(IntEnum):
    """Where a device's rollout engine is in its life. See `lifecycle`."""

    DORMANT = 0
    ACTIVATING = 1
    ACTIVE = 2
    DRAINING = 3


class Rule(IntEnum):
    """How a device lends its compute. See `admission.RULES`."""

    ROSE = 0
    IDLE_GATE = 1
    PAPER_SLACK = 2
    SHARE_ALL = 3
    STATIC_SPLIT = 4


class MemoryPolicy(IntEnum):
    """How rollout's memory gives way to serving's need. See `memory`."""

    TRIM = 0
    AIMD = 1
    HALVE_AND_FREEZE = 2


ENUMS: tuple[type[IntEnum], ...] = (LeaseState, Rule, MemoryPolicy)
"""Whose numbers stand on the page."""


class ServingFacts(msgspec.Struct, frozen=True):
    """One scheduler tick of the serving engine."""

    tick: int = 0
    written: float = 0.0
    """When these facts were published; 0 when unknown."""
    running: int = 0
    waiting: int = 0
    decode_deadline: float = NEVER
    """The tightest next-token deadline of the running requests, with credit."""
    prefill_deadline: float = NEVER
    """The tightest first-token deadline of the requests still without one."""
    tight_decode_deadline: float = NEVER
    """The same without credit: what the paper's rule looks at."""
    next_step_s: float = 0.0
    """Upper bound of the next serving step, with all that is here now. See `bounds`."""
    clear_s: float = 0.0
    """Upper bound until every waiting request has its first token."""
    next_step_with_new_s: float = 0.0
    """`next_step_s` if a worst-case new request joins."""
    clear_with_new_s: float = 0.0
    """`clear_s` if a worst-case new request joins."""
    next_step_after_new_s: float = 0.0
    """`next_step_s` once a worst-case new request has its first token and decodes."""
    next_new_25_s: float = 0.0
    next_new_62_s: float = 0.0
    next_new_82_s: float = 0.0
    next_new_93_s: float = 0.0
    next_new_98_s: float = 0.0
    """What `next_step_s` likely is if a request of that percentile of recent prompts joins."""
    clear_new_25_s: float = 0.0
    clear_new_62_s: float = 0.0
    clear_new_82_s: float = 0.0
    clear_new_93_s: float = 0.0
    clear_new_98_s: float = 0.0
    """What `clear_s` likely is then."""
    base_s: float = 0.0
    """The part of these that one more new request does not add: a step without any prompt."""
    arrived: int = 0
    """Requests since the engine started."""
    arrivals: int = 0
    """The page's arrivals word that these facts know of: a larger one voids them."""
    arrival_rate: float = 0.0
    """Recent requests per second; 0 when unknown."""
    step_began: float = 0.0
    """When the step in flight began: requests that came since are not in these facts yet."""
    step_ends: float = 0.0
    """Predicted latest end of the step in flight; 0 when there is none."""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    kv_used: int = 0
    """Bytes of blocks that requests hold now."""
    kv_need: int = 0
    """`kv_used` and what the waiting requests still need."""
    kv_warm: int = 0
    """Bytes of cached prefixes, of nobody now, that users come back to. See `working_set`."""
    kv_lacks: int = 0
    """Bytes beyond the quota that a burst like recent ones, or a worst-case new request, needs."""
    prefix_tokens: int = 0
    """Prompt tokens of requests so far,"""
    prefix_hits: int = 0
    """those found in the prefix cache,"""
    prefix_lost: int = 0
    """and those that would have been found had nothing been lent, in estimation."""
    prefix_loss: float = 0.0
    """Share of recent hit tokens that was lost to lending."""
    kv_quota: int = 0
    """Bytes serving may use at most, already in force."""
    kv_acked: int = 0
    """Latest claim revision of the rollout engine that `kv_quota` respects."""
    kv_max: int = 0
    """Virtual size of serving's KV cache."""
    worst_prompt: int = 0
    """Tokens of the worst-case new prompt (recent upper percentile)."""
    overhead_us: float = 0.0
    latency_error: float = 0.0
    latency_coverage: float = 1.0

    def fresh(self, now: float) -> bool:
        """Whether they may be relied upon now: neither old nor of a time that has not come."""
        return now - FACTS_S <= self.written <= now

    def capped(self) -> ServingFacts:
        """With predictions beyond what a page may say as long as it may say: a queue of hours is
        overload, not garbage."""
        beyond = {
            name: MAX_SECONDS for name in _seconds(type(self)) if getattr(self, name) > MAX_SECONDS
        }
        return msgspec.structs.replace(self, **beyond) if beyond else self

    @property
    def busy(self) -> bool:
        return self.running > 0 or self.waiting > 0

    @property
    def guarded(self) -> bool:
        """The worst-case new request is shorter than some that come: they would need too long."""
        return self.clear_new_98_s > self.clear_with_new_s

    def implausible(self) -> str | None:
        return _absurd(self) or _first(
            (self.kv_used > self.kv_max, "kv_used above kv_max"),
            (self.kv_quota > self.kv_max, "kv_quota above kv_max"),
            (self.ttft_s <= 0 or self.tpot_s <= 0, "an SLO of zero"),
            (self.running > 1_000_000 or self.waiting > 1_000_000, "a million requests"),
        )


class RolloutFacts(msgspec.Struct, frozen=True):
    """One scheduler tick of the rollout engine."""

    tick: int = 0
    written: float = 0.0
    """When these facts were published."""
    begun: int = 0
    ended: int = 0
    """Steps that the engine has begun, and that have ended."""
    state: int = LeaseState.DORMANT
    epoch: int = 0
    """Latest epoch of the node's orders that has been carried out."""
    running: int = 0
    waiting: int = 0
    preemptible: int = 0
    """1 when the kernel runs serving before a rollout step already begun."""
    granted: int = 0
    granted_tokens: int = 0
    refused_busy: int = 0
    refused_decode: int = 0
    refused_prefill: int = 0
    refused_arrival: int = 0
    refused_memory: int = 0
    refused_page: int = 0
    refused_state: int = 0
    late_expected: float = 0.0
    """Serving requests that the granted steps made late, in expectation: error budget spent."""
    kv_claim: int = 0
    """Bytes rollout holds or is about to hold."""
    kv_revision: int = 0
    """Counts up whenever `kv_claim` changes."""
    kv_used: int = 0
    kv_resident: int = 0
    """Bytes of blocks not parked: what physically can be resident."""
    kv_may: int = 0
    """Bytes it could have now, had it a use for them."""
    kv_max: int = 0
    kv_cuts: int = 0
    kv_grown: int = 0
    ended_reclaimed: int = 0
    ended_revoked: int = 0
    ended_dormant: int = 0
    preempted: int = 0
    reclaim_last_ms: float = 0.0
    step_last_ms: float = 0.0
    overhead_us: float = 0.0
    latency_error: float = 0.0
    latency_coverage: float = 1.0

    def implausible(self) -> str | None:
        return _absurd(self) or _first(
            (self.kv_claim > self.kv_max, "kv_claim above kv_max"),
            (self.state > max(LeaseState), "an unknown state"),
        )


class NodeOrders(msgspec.Struct, frozen=True):
    """What the node agent wants of the rollout engine."""

    epoch: int = 0
    written: float = 0.0
    """When the node last said so; it repeats that, and orders that grow old end."""
    offered: int = 1
    """0: the device's owner has taken it back, and whatever else is said here is void."""
    state: int = LeaseState.DORMANT
    """The state to reach: DORMANT, ACTIVE, or DRAINING (finish what runs, take nothing new)."""
    rule: int = Rule.ROSE
    preempt_us: int = 0
    """Measured delay of sub-step preemption; 0 when the device has none."""
    memory_policy: int = MemoryPolicy.TRIM
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    """Serving's promises, if they changed since its engine started; 0 when not."""
    error_budget: float = 0.0
    """Share of serving's requests that lending may make late, in expectation. See `budget`."""

    def implausible(self) -> str | None:
        return _absurd(self) or _first(
            (self.state > max(LeaseState), "an unknown state"),
            (self.rule > max(Rule), "an unknown rule"),
            (self.memory_policy > max(MemoryPolicy), "an unknown memory policy"),
            (self.error_budget > 1, "an error budget of more than all requests"),
        )


def _first(*checks: tuple[bool, str]) -> str | None:
    return next((why for wrong, why in checks if wrong), None)


@cache
def _seconds(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name.endswith("_s"))


@cache
def _limits(kind: type[msgspec.Struct]) -> tuple[tuple[str, float], ...]:
    """Name and largest believable value of every field."""

    def limit(name: str) -> float:
        if name.startswith("kv_"):
            return MAX_BYTES
        return MAX_SECONDS if name.endswith("_s") else math.inf

    return tuple((name, limit(name)) for name in kind.__struct_fields__)


def _absurd(facts: msgspec.Struct) -> str | None:
    values = msgspec.structs.astuple(facts)
    for (name, most), value in zip(_limits(type(facts)), values, strict=True):
        if not 0 <= value <= most:
            return f"{name} is {value}"
    return None
