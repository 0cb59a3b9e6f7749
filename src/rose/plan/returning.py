"""Serving's users who come back: what of their prompts is cached, what that is worth, what is lost.

A request may go on from an earlier one of its device (`Visits`): a share of its prompt is then the
context of that one, and need not be computed if its KV is still there. Two caches say so. The real
one has the memory that running requests and rollouts leave, and loses whole contexts, the longest
unused first. Beside it the live `working_set` sees the cache that serving would have if nothing was
lent, in coarse blocks, and says how much of it is warm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.random import Generator

from rose.executor.working_set import LOSS, WorkingSet
from rose.plan.engine import Job
from rose.plan.prefixes import Prefixes
from rose.plan.workload.traffic import Traffic

KNOWN_SHARE = 0.9
"""Of the prompt of who comes back: a chat sends all that was said, and something new."""
MOST_BLOCK, BLOCKS = 256, 2048
"""Tokens of a block at most, and blocks of a cache that has room for fewer tokens than that: some
blocks to a prompt are enough to tell ages, at a sixteenth of the cost of vLLM's."""
COUNT_S = 5.0
"""The count of warm blocks is that old at most, a hundredth of what it looks back over."""
HERE = 0
"""The only device of a device's prefixes."""


@dataclass(frozen=True)
class Visits:
    """Of a device's requests, in order of arrival."""

    after: list[int]
    """The earlier one whose context each goes on from; -1: it is somebody new."""
    share: float
    """Of the prompt of who comes back."""
    past: list[tuple[float, int]]
    """Contexts of those before the first, by age: since when, and how long. They are numbered on
    from the last."""


def visits(traffic: Traffic, hit_rate: float, return_s: float, rng: Generator) -> Visits:
    """Who comes back to whom, so that `hit_rate` of the prompt tokens have been seen before.

    From one to the next passes an exponential time of mean `return_s`; each context is gone on from
    once, so the nearest before that is taken that nobody else came back to. Users were there before
    the first request too.
    """
    share = max(hit_rate, KNOWN_SHARE)
    count, arrival = len(traffic), traffic.arrival_s
    comes_back = rng.random(count) < hit_rate / share
    since = arrival - rng.exponential(return_s, count)
    nearest = np.searchsorted(arrival, since, "right") - 1
    free = list(range(count + 1))
    """Of each request and the one before the first: itself, or one nearer to the free one."""

    def freed(index: int) -> int:
        while free[index] != index:
            free[index] = free[free[index]]
            index = free[index]
        return index

    after = [-1] * count
    past: list[tuple[float, int]] = []
    for index in np.flatnonzero(comes_back).tolist():
        place = freed(min(int(nearest[index]), index - 1) + 1)
        if place:
            after[index], free[place] = place - 1, place - 1
        else:
            past.append((min(0.0, float(since[index])), index))
    past.sort()
    for number, (_, index) in enumerate(past):
        after[index] = count + number
    known = [(when, round(share * int(traffic.prompt[index]))) for when, index in past]
    return Visits(after, share, known)


class _Open(NamedTuple):
    number: int
    began: list[int]
    """Blocks of its prompt, as it came."""
    blocks: list[int]
    """The same with its answer."""


class Returning:
    """Of one device."""

    def __init__(self, of: Visits, capacity: int, loss: float = LOSS) -> None:
        """`capacity`: tokens of serving's cache if nothing is lent; `loss`: see `working_set`."""
        self._visits = of
        self._gone_on = set(of.after)
        self._block = max(1, min(MOST_BLOCK, capacity // BLOCKS))
        self._undisturbed = WorkingSet(max(1, capacity // self._block), loss)
        self._kept = Prefixes(1)
        self._blocks: dict[int, list[int]] = {}
        """Of requests that somebody will come back to."""
        self._open: dict[int, _Open] = {}
        self._came = 0
        for number, (since, tokens) in enumerate(of.past, len(of.after)):
            self._blocks[number] = self._numbered(number, tokens)
            self._undisturbed.end((), self._blocks[number], since)
            self._kept.keep(HERE, number, tokens)
        self._warm, self._counted = 0, -COUNT_S
        self.tokens = self.hits = self.lost = 0
        """Of prompts so far, found, and not found though nothing lent would have left them there;
        as the live `prefix_book` counts."""

    def begin(self, job: Job, now: float) -> Job:
        """A request came: with what is left to compute of its prompt."""
        number, self._came = self._came, self._came + 1
        before = self._visits.after[number]
        old: list[int] = []
        known = found = 0
        if before >= 0:
            known = min(job.prompt - 1, round(self._visits.share * job.prompt))
            contexts = self._blocks.pop(before)
            old = contexts[: self._count(known)]
            kept = str(HERE) in self._kept.of(before)
            runs = any(one.number == before for one in self._open.values())
            found = known if kept or runs else 0
            self._kept.forget(HERE, before)
        # Lengths are drawn one by one: who comes back to a context shorter than that finds it all.
        own = self._numbered(number, job.context + job.new - known)
        began = [*old, *own[: self._count(job.prompt - known)]]
        seen = min(self._undisturbed.begin(began, now).found, len(old))
        undisturbed = round(known * seen / len(old)) if old else 0
        one = _Open(number, began, [*old, *own])
        if number in self._gone_on:
            self._blocks[number] = one.blocks
        self._open[job.id] = one
        self.tokens += job.prompt
        self.hits += found
        self.lost += max(0, undisturbed - found)
        return replace(job, prompt=job.prompt - found)

    def end(self, job: Job, now: float) -> None:
        """It has ended, and what it leaves is kept until memory is wanted for others (`fit`)."""
        one = self._open.pop(job.id)
        self._undisturbed.end(one.began, one.blocks, now)
        self._kept.keep(HERE, one.number, job.context + job.new)

    def fit(self, room: int) -> None:
        """So many tokens are left for what nobody uses."""
        self._kept.fit(HERE, room)

    def warm(self, now: float) -> int:
        """Tokens worth keeping."""
        if now - self._counted >= COUNT_S:
            self._warm, self._counted = self._undisturbed.warm(now) * self._block, now
        return self._warm

    def _numbered(self, request: int, tokens: int) -> list[int]:
        """Blocks that no other request has."""
        return list(range(request << 20, (request << 20) + self._count(tokens)))

    def _count(self, tokens: int) -> int:
        return max(1, round(tokens / self._block))
