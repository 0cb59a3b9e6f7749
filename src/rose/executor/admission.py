"""How long may the rollout engine's next step take? A pure function of serving's facts and time.

The device runs one step at a time as far as deadlines are concerned: whatever a rollout step takes,
serving's next step may end that much later. Let `r` be the upper bound of the rollout step, `f`
what is left of serving's step in flight. The rule `rose` lets it take as long as

    (1) decode    now + f + r + next serving step          <= tightest next-token deadline
    (2) prefill   now + f + r + until all waiting started  <= tightest first-token deadline
    (3) arrival         u + r + the same with one more     <= TTFT promise
    (4) start             r + next serving step            <= TPOT promise

where the serving bounds already contain a worst-case new request that arrives in the middle of the
rollout step. So slack is lent only when the next serving request provably fits. The deadlines carry
credit (see `slo`): a request that ran ahead of its pace lends the lead. (4) is for a request whose
first token comes just before the rollout step: it has no deadline yet and no lead. That may be one
of those waiting, beside a worst-case new one; or the new one itself, which decodes then.

A step begins only if serving has taken no request that the facts do not know (`gate` compares the
page's arrivals word before each). So windows on an idle serving engine may be good for many steps:
whoever comes meets at most the one that runs.

Memory is part of the promise. A request that finds no free blocks waits until the rollout step in
flight has ended, preempted or not, and then for `give_back_s`, while its turns end and their memory
comes back. So while serving lacks memory that it may soon need (`kv_lacks`: for a worst-case new
request, or for a burst like recent ones), the whole step counts as `r`, and (3) keeps that time
too. While a request waits for memory, nothing is granted.

`u` is the longest that a new request may wait unseen: a serving engine takes new ones only between
its steps, so one may have come just after the step in flight began, or may just miss the next one.
And `f` counts from the promised end of the step in flight, later by what the rollout engine itself
has taken from the device since that step began.

Two variants. With sub-step preemption (CPU: SCHED_IDLE) serving overtakes a rollout step already
begun, so `r` is the measured preemption delay; a step begun while serving computes would only crawl
and waste cache, so it is not begun. Without preemption (`preempt_s=None`, a GPU today) the whole
rollout step blocks, its tokens are cut to what fits, and slack of requests being served is lent too
when it allows a step with all turns (half a batch costs the device nearly as much as a whole one)
and serving has not been idle for a while. Until then it is better to wait: two engines in turns on
one device slow each other, and a serving request that is done sooner leaves it to rollouts
altogether. But serving that always has a request or two would never leave it.

Without preemption the worst case is dear: the longest prompt at the worst moment almost never
comes. But serving promises a percentile, so a few of its requests may be late, and lending may use
up a small share of those: its *error budget* (see `budget`). A step may take longer than above if
the allowance covers its *risk*, the expected number of serving requests that it makes late. It must
be worth it: a step longer by the whole TTFT promise may spend `SPEND` of the allowance, others as
much less as they are shorter. So the budget goes where it buys most, and is never spent at once.
Prompts so long that serving guards itself against fewer of them than come (`guarded`) leave no step
that is safe from the outset: then all of it is paid, and what cannot be paid is shorter.
Requests already here stay safe from the step as such: (1), (2) and (4) without a new request hold
always. The risk is all about new ones, of each size of prompt (`NEW`), at the recent rate, with
steps as long as they likely are (`latency.LIKELY`), because it is a sum over many:

    late itself    rate * share of size * clip(u + r + clear - TTFT, 0, u + r), and all of u + r
                   where (4) is likely broken for it
    makes others   rate * share of sizes that break (1), (2) or (4) * (u + r + next step) * all here
    in pairs       chance of another new one in u + r, times what it adds to "late itself" if
                   `clear` is longer by its prompt

(4) guards a new request against all of a rollout step between its first two tokens. Likely it meets
less: a step that began before it either has ended by its first token (one after the other), or goes
on beside it (side by side), and then holds its next step up by no more than that takes itself.

A new request waits from its arrival until `u + r` is over and then `clear`. Arrivals are even over
all of `u + r`, so late are those of its first `u + r + clear - TTFT` seconds: dividing by `r`, as
if all came during the rollout step, would count more of them than can come. One that arrives in the
serving step after that still meets the slack spent, so it counts for others. A request that would
be late by itself is nobody's fault. A pair in one window is rare, but so is a late request: left
out, the sum could be a quarter too low. Three are not counted, nor are pairs under the rule without
budget, which is proven for one new request at a time.

`idle_gate` and `paper_slack` are there to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from rose.executor.facts import FACTS_S, NEVER, ServingFacts

CHUNK = 512
"""Rollout prefill tokens per step at most, as in the paper: bounds the longest rollout step."""
SPEND = 0.1
"""Share of the allowance that a rollout step may spend if it is longer by the TTFT promise. All of
it at once buys whatever comes first; much less leaves budget unspent."""
PATIENCE = 20.0
"""Steps with all turns that serving must have been busy for, before its requests' slack is lent."""
BURST = 4.0
"""TTFT promises that it must have been busy for, too: a burst makes a queue, and is over by then.
What is lent of a queue is paid by all who come behind it."""
HALVINGS = 6
"""Of the time beyond the safe step, to find the longest one that the allowance covers."""
NEW = (
    (0.50, "next_new_25_s", "clear_new_25_s"),
    (0.25, "next_new_62_s", "clear_new_62_s"),
    (0.15, "next_new_82_s", "clear_new_82_s"),
    (0.07, "next_new_93_s", "clear_new_93_s"),
    (0.03, "next_new_98_s", "clear_new_98_s"),
)
"""New requests by size of prompt: share of all, and serving's times with the middle one of them."""


class Refusal(StrEnum):
    """Why a step was not granted."""

    BUSY = "busy"
    """Serving computes now, or longer than it said: a preemptible step would only crawl, an idle
    gate stays shut, and what an overdue step leaves for deadlines is unknown."""
    DECODE = "decode"
    """A running serving request would miss its next-token deadline."""
    PREFILL = "prefill"
    """A waiting serving request would miss its first-token deadline."""
    ARRIVAL = "arrival"
    """A worst-case new serving request would miss its first-token deadline."""
    MEMORY = "memory"
    """A serving request waits for memory, or would miss its deadline if it had to."""
    PAGE = "page"
    """Serving's half of the page cannot be read or believed, or is too old."""
    STATE = "state"
    """The rollout engine is not active (dormant, or without memory)."""


@dataclass(frozen=True)
class Terms:
    """How a device lends its compute."""

    rule: str = "rose"
    preempt_s: float | None = None
    """Measured delay until serving overtakes a running rollout step; None when it cannot."""
    error_budget: float = 0.0
    """Share of serving's requests that lending may make late; what `ErrorBudget` earns."""


class Question(NamedTuple):
    """All that decides on the next rollout step."""

    facts: ServingFacts
    terms: Terms
    now: float
    occupied_s: float = 0.0
    """Time the rollout engine has had steps on the device since `step_began`."""
    allowance: float = 0.0
    """Expected late requests that may be spent now."""
    likely: float = 1.0
    """Share of its bound that a rollout step likely takes."""
    worth_s: float = 0.0
    """How long a step with all turns takes: beside serving, a shorter one is not worth it."""
    busy_s: float = math.inf
    """How long serving has not been idle."""
    give_back_s: float = 0.0
    """From the end of a rollout step until memory that serving wants is serving's."""

    @property
    def fresh_until(self) -> float:
        """Facts without a time are believed for ever, facts from the future never."""
        written = self.facts.written
        if written > self.now:
            return -math.inf
        return written + FACTS_S if written else math.inf

    @property
    def flight_ends(self) -> float:
        """Latest end of serving's step in flight; never when there is none."""
        return self.facts.step_ends + self.occupied_s if self.facts.step_ends else math.inf


@dataclass(frozen=True)
class Window:
    """Time for the next rollout step."""

    seconds: float
    until: float = math.inf
    """Latest time at which the step may begin: after that the facts it rests on are void."""
    once: bool = False
    """For one step: it uses up the slack of requests that are being served."""
    binding: Refusal = Refusal.BUSY
    """What keeps the window from being longer."""
    safe_s: float = math.inf
    """A step up to this long makes nobody late."""
    late: Callable[[float], float] | None = None

    def risk(self, step_s: float) -> float:
        """Serving requests that a step of that length makes late, in expectation."""
        return self.late(step_s) if self.late is not None and step_s > self.safe_s else 0.0


OPEN = Window(math.inf)


def shut(why: Refusal) -> Window:
    return Window(0.0, binding=why)


def window(q: Question) -> Window:
    """The answer by the rule of the terms."""
    return RULES[q.terms.rule](q)


class _Room(NamedTuple):
    """What deadlines leave for rollout's and serving's next steps together."""

    unseen: float
    token: float
    """Until the next token of a request here is due, from the end of the step in flight."""
    first: float
    """Until the first token of a waiting one is due."""

    def beside(self, next_step_s: float, clear_s: float) -> float:
        """The longest rollout step with which the requests here keep their deadlines."""
        return min(self.token - next_step_s, self.first - clear_s)


def _room(q: Question) -> _Room:
    facts = q.facts
    in_flight, unseen = 0.0, facts.next_step_s
    if facts.step_ends:
        in_flight = max(0.0, q.flight_ends - q.now)
        unseen = max(unseen, q.now - facts.step_began + in_flight)
    token = facts.decode_deadline - q.now - in_flight
    if facts.prefill_deadline < NEVER:
        token = min(token, facts.tpot_s)
    return _Room(unseen, token, facts.prefill_deadline - q.now - in_flight)


def _rose(q: Question) -> Window:
    facts = q.facts
    if q.now > q.fresh_until:
        return shut(Refusal.PAGE)
    if facts.busy and (q.terms.preempt_s is not None or q.now > q.flight_ends):
        return shut(Refusal.BUSY)
    if facts.waiting and facts.kv_need > facts.kv_quota:
        return shut(Refusal.MEMORY)
    room = _room(q)
    arrival = facts.ttft_s - room.unseen - facts.clear_with_new_s
    memory = arrival - q.give_back_s if facts.kv_lacks else math.inf
    slack = {
        Refusal.ARRIVAL: arrival,
        Refusal.DECODE: min(
            room.token - facts.next_step_with_new_s, facts.tpot_s - facts.next_step_after_new_s
        ),
        Refusal.PREFILL: room.first - facts.clear_with_new_s,
    }
    binding = min(slack, key=lambda reason: slack[reason])
    if q.terms.preempt_s is not None:
        if slack[binding] < q.terms.preempt_s:
            return Window(0.0, q.fresh_until, binding=binding)
        binding = Refusal.MEMORY if facts.kv_lacks else binding
        return Window(max(0.0, memory), q.fresh_until, binding=binding)
    if memory < slack[binding]:
        slack[Refusal.MEMORY], binding = memory, Refusal.MEMORY
    safe = longer = max(0.0, slack[binding])
    until = q.fresh_until
    if q.now <= q.flight_ends:
        until = min(until, q.flight_ends)
    if q.terms.error_budget > 0 and facts.arrival_rate > 0:
        safe = 0.0 if facts.guarded else safe
        longer = _longest(q, room, safe)
    patience_s = max(PATIENCE * q.worth_s, BURST * facts.ttft_s)
    if facts.busy and (longer < q.worth_s or q.busy_s < patience_s):
        return shut(binding)
    return Window(longer, until, facts.busy, binding, safe, partial(_risk, facts, room, q.likely))


def _longest(q: Question, room: _Room, safe: float) -> float:
    """The longest step whose risk the allowance covers: risk grows faster than what it buys."""
    facts = q.facts
    low, high = safe, min(room.beside(facts.next_step_s, facts.clear_s), facts.ttft_s)
    if facts.kv_lacks:
        high = min(high, facts.ttft_s - room.unseen - facts.clear_s - q.give_back_s)
    price = max(0.0, q.allowance) * SPEND / facts.ttft_s

    def covered(step_s: float) -> bool:
        most = price * (step_s - safe)
        return _risk(facts, room, q.likely, step_s, most) <= most

    if high <= low or covered(high):
        return max(low, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if covered(middle) else (low, middle)
    return low


def _risk(
    facts: ServingFacts, room: _Room, likely: float, upper_s: float, enough: float = math.inf
) -> float:
    """Serving requests that a rollout step makes late; above `enough` only the first terms."""
    step_s, rate = likely * upper_s, facts.arrival_rate
    span = room.unseen + step_s
    new = [(share, getattr(facts, step), getattr(facts, clear)) for share, step, clear in NEW]
    late = broken = 0.0
    stalls = min(step_s, facts.base_s) + facts.base_s > facts.tpot_s >= facts.base_s
    for share, next_step_s, clear_s in new:
        if clear_s <= facts.ttft_s:
            late += share * (span if stalls else _clip(span + clear_s - facts.ttft_s, span))
        if step_s > room.beside(next_step_s, clear_s) >= 0.0:
            broken += share
    others = broken * (facts.running + facts.waiting) * (span + facts.next_step_s)
    risk = rate * (late + others)
    if risk > enough:
        return risk
    both = 0.0
    for share, _, clear_s in new:
        behind = span + clear_s - facts.ttft_s - facts.base_s
        if clear_s <= facts.ttft_s:
            for other, _, other_s in new:
                both += share * other * _clip(behind + other_s, span)
    another = -math.expm1(-rate * span)
    return risk + another * rate * max(0.0, both - late)


def _clip(seconds: float, most: float) -> float:
    return 0.0 if seconds <= 0.0 else min(seconds, most)


def _idle_gate(q: Question) -> Window:
    """A step only while serving is empty, whatever its length."""
    if q.now > q.fresh_until:
        return shut(Refusal.PAGE)
    return shut(Refusal.BUSY) if q.facts.busy else Window(math.inf, q.fresh_until)


def _paper_slack(q: Question) -> Window:
    """ROSE as published: both slacks positive, no look at the rollout step's own length."""
    facts = q.facts
    if q.now > q.fresh_until:
        return shut(Refusal.PAGE)
    prefill = facts.prefill_deadline - facts.clear_s
    decode = facts.tight_decode_deadline - facts.next_step_s
    if prefill <= q.now:
        return shut(Refusal.PREFILL)
    if decode <= q.now:
        return shut(Refusal.DECODE)
    return Window(math.inf, min(q.fresh_until, prefill, decode))


def _share_all(q: Question) -> Window:
    """No gate at all: the baseline that shows what is at stake."""
    return OPEN


def _static_split(q: Question) -> Window:
    """Fixed time slices: half of every second is rollout's, whatever serving does."""
    into = q.now % 1.0
    return Window(math.inf, q.now + 0.5 - into) if into < 0.5 else Window(0.0, q.now + 1.0 - into)


RULES: dict[str, Callable[[Question], Window]] = {
    "rose": _rose,
    "idle_gate": _idle_gate,
    "paper_slack": _paper_slack,
    "share_all": _share_all,
    "static_split": _static_split,
}
