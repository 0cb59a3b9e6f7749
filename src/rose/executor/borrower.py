"""The rollout engine's standing on its device: what it was ordered, and what it may hold.

Orders are the node's, on the page. What cannot be read is a reason to stop: orders that nobody
repeats end, and so does the claim on a device whose serving engine cannot be seen. Taking a device
back needs no disk, no scheduler and no healthy rollout engine; it needs this page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from rose.executor import lifecycle, memory
from rose.executor.admission import Terms
from rose.executor.border import Border, Quota
from rose.executor.facts import LeaseState, MemoryPolicy, NodeOrders, Rule
from rose.executor.page import Page

NODE_GRACE_S = 3.0
"""Without a node nobody could take the device back, so the engine lets go. A node repeats its
orders several times a second; one that is started again needs longer than this anyway."""


class Borrower:
    def __init__(
        self,
        page: Page,
        parking: Quota,
        publish: Callable[[], None],
        terms: memory.MemoryTerms,
        *,
        dedicated: bool,
        clock: Callable[[], float] = time.monotonic,
        void: Callable[[], None] = lambda: None,
    ) -> None:
        self._page = page
        self._parking = parking
        self._clock = clock
        self._dedicated = dedicated
        self._memory = terms
        self.border = Border(page, parking, publish, dedicated=dedicated, clock=clock, void=void)
        self.state = LeaseState.DORMANT
        self.epoch = 0
        """Of the orders that were carried out last."""
        self.terms = Terms()
        self._ordered = LeaseState.DORMANT
        self._ordered_at = -math.inf
        self._seen_at = -math.inf

    def follow_orders(self, *, empty: bool) -> bool:
        """Go where the node wants us; True when that is news. `empty`: there are no turns."""
        reading = self._page.node()
        now = self._clock()
        epoch = self.epoch
        if reading is not None:
            orders, epoch = reading.facts, reading.facts.epoch
            if now - NODE_GRACE_S <= orders.written <= now:
                self._ordered_at = max(self._ordered_at, orders.written)
            self._ordered = LeaseState(orders.state) if orders.offered else LeaseState.DORMANT
            self.terms = terms_of(orders)
            policy = MemoryPolicy(orders.memory_policy).name.lower()
            self._memory = replace(self._memory, policy=policy)
        abandoned = now - self._ordered_at > NODE_GRACE_S
        if abandoned:
            with suppress(OSError):  # no node does it, and the next one must be able to start
                self._page.mend(self._clock)
        state = lifecycle.follow(
            self.state,
            LeaseState.DORMANT if abandoned else self._ordered,
            has_memory=self._parking.usable > 0,
            empty=empty,
        )
        changed = state != self.state or epoch != self.epoch
        self.state, self.epoch = state, epoch
        return changed

    def follow_memory(self, useful: int, make_room: Callable[[int], None] | None) -> bool:
        """Move our side of the KV border; True when something changed."""
        serving = None if self._dedicated else self._page.lending(self._clock)
        now = self._clock()
        if serving is not None:
            self._seen_at = now
        demand = memory.Demand(
            active=lifecycle.holds_memory(self.state),
            serving_need=serving.facts.kv_need if serving is not None else 0,
            unseen_s=0.0 if self._dedicated else now - self._seen_at,
            rl_step=self.epoch,
            serving_warm=serving.facts.kv_warm if serving is not None else 0,
            useful=useful,
        )
        return self.border.follow(
            demand, self._memory, serving.facts if serving is not None else None, make_room
        )

    @property
    def may_run(self) -> bool:
        return self.state in (LeaseState.ACTIVE, LeaseState.DRAINING)


def terms_of(orders: NodeOrders) -> Terms:
    delay = orders.preempt_us / 1e6
    return Terms(
        Rule(orders.rule).name.lower(),
        delay if orders.preempt_us else None,
        orders.error_budget,
    )
