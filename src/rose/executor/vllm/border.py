"""The rollout engine's side of the KV border: follow the policy, hand memory over in safe order.

See `memory` for the policy and why the order of claim, acknowledgement and use is safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rose.executor import memory
from rose.executor.facts import ServingFacts
from rose.executor.memory import Budget, Demand, MemoryTerms
from rose.executor.page import Page
from rose.executor.vllm.parking import Parking


class Border:
    def __init__(
        self, page: Page, parking: Parking, publish: Callable[[], None], *, dedicated: bool
    ) -> None:
        self._dedicated = dedicated
        self._page = page
        self._parking = parking
        self._publish = publish
        self._budget = Budget()
        self.claim = 0
        self.revision = time.monotonic_ns() // 1000  # never reused, also not by a restarted engine
        self.cuts = 0
        self.grown = 0
        self.reclaim_ms = 0.0
        self.owes = False
        """Requests hold blocks that the policy wants back."""
        parking.set_usable(0)

    def follow(
        self,
        demand: Demand,
        terms: MemoryTerms,
        serving: ServingFacts | None,
        make_room: Callable[[int], None] | None,
    ) -> bool:
        """Move to where the policy wants the border; True when something changed.

        `serving` is None on a dedicated device or when its engine is dead. `make_room` ends turns
        until that many blocks are free; None when it may not (a step is in flight).
        """
        now = time.monotonic()
        self._budget = memory.decide(self._budget, demand, terms, now)
        wanted = self._budget.bytes // self._parking.block_bytes
        held = self._parking.usable
        self.owes = False
        if wanted < held:
            return self._lower(wanted, held, make_room, now)
        changed = self._stake(wanted)
        if self._dedicated or (
            serving is not None
            and memory.may_use(
                self.claim, self.revision, serving.kv_acked, serving.kv_quota, terms.total
            )
        ):
            self.grown += self._parking.set_usable(wanted) > held
        return changed or self._parking.usable != held

    def _lower(
        self, wanted: int, held: int, make_room: Callable[[int], None] | None, began: float
    ) -> bool:
        """Give pages back first, then say so."""
        reached = self._parking.set_usable(wanted)
        if reached > wanted and make_room is not None:
            make_room(reached - wanted)
            reached = self._parking.set_usable(wanted)
        self.owes = reached > wanted
        self.cuts += reached < held
        self.reclaim_ms = (time.monotonic() - began) * 1e3
        return self._stake(reached)

    def _stake(self, blocks: int) -> bool:
        claim = blocks * self._parking.block_bytes
        if claim == self.claim:
            return False
        self.claim = claim
        self.revision += 1
        self._publish()
        self._page.ring("serving")
        return True
