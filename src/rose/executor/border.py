"""The rollout engine's side of the KV border: follow the policy, hand memory over in safe order.

See `memory` for the policy and why the order of claim, acknowledgement and use is safe.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rose.executor import memory
from rose.executor.facts import ServingFacts
from rose.executor.memory import Budget, Demand, MemoryTerms
from rose.executor.page import Page

RECLAIMS_REMEMBERED = 16


class Quota(Protocol):
    """A share of an engine's KV blocks that its requests may use (`vllm.parking`)."""

    block_bytes: int
    blocks: int

    @property
    def usable(self) -> int: ...

    @property
    def used(self) -> int: ...

    def set_usable(self, wanted: int) -> int: ...


class Border:
    def __init__(
        self,
        page: Page,
        parking: Quota,
        publish: Callable[[], None],
        *,
        dedicated: bool,
        clock: Callable[[], float] = time.monotonic,
        void: Callable[[], None] = lambda: None,
    ) -> None:
        """`void`: a window to run in that was granted beside less memory holds no more."""
        self._dedicated = dedicated
        self._page = page
        self._parking = parking
        self._publish = publish
        self._void = void
        self._clock = clock
        self._budget = Budget()
        self.may = 0
        """Bytes that the policy would let us have."""
        self.claim = 0
        self.revision = int(clock() * 1e6)  # never reused, also not by a restarted engine
        self.cuts = 0
        self.grown = 0
        self.reclaim_ms = 0.0
        self._reclaims: deque[float] = deque(maxlen=RECLAIMS_REMEMBERED)
        self.owes = False
        """Requests hold blocks that the policy wants back."""
        parking.set_usable(0)

    @property
    def give_back_s(self) -> float:
        """The longest that recent memory took to give back, beside the step it had to wait for."""
        return max(self._reclaims, default=0.0)

    def follow(
        self,
        demand: Demand,
        terms: MemoryTerms,
        serving: ServingFacts | None,
        make_room: Callable[[int], None] | None,
    ) -> bool:
        """Move to where the policy wants the border; True when something changed.

        `serving` is None on a dedicated device or when its facts cannot be relied upon. `make_room`
        ends turns until that many blocks are free; None when it may not (a step is in flight).
        """
        now = self._clock()
        self._budget = memory.decide(self._budget, demand, terms, now)
        self.may = memory.reach(self._budget, demand, terms)
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
            if wanted > held:
                self._void()
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
        took = self._clock() - began
        self._reclaims.append(took)
        self.reclaim_ms = took * 1e3
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
