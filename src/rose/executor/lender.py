"""Serving's side of the device's memory: respect the rollout engine's claim, and no more than that.

The lender keeps serving's KV quota at what the claim leaves, and acknowledges a claim once the
quota is in force. Only a rollout engine that is certainly gone claims nothing; one that cannot be
read keeps what it was last known to claim. When nobody else takes memory back (the node is dead,
the engine hangs), the lender kills the engine that holds it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rose.executor.border import Quota
from rose.executor.memory import serving_quota
from rose.executor.page import Page
from rose.executor.processes import Writer
from rose.executor.suspicion import Suspicion

logger = logging.getLogger("vllm.rose")


class LentQuota(Quota, Protocol):
    """Serving's: it comes and goes, and its memory with it."""

    def bring(self, blocks: int) -> bool:
        """Have the pages of so many blocks that were given back, before they are used; True when
        there are more. Serving's steps would pay for each that is missing."""


BRING, BRING_S = 4 << 20, 0.02
"""Bytes that are brought at a time, and how often: faster than serving uses them, and a sixth of a
host core, which those who take a device back need too."""
PATIENCE = 1.2
"""Of the node's: where there is one, it is first."""


class Lender:
    def __init__(
        self,
        page: Page,
        parking: LentQuota,
        headroom: float,
        guard: AbstractContextManager[object],
        *,
        slice_bytes: int,
        owns: bool,
    ) -> None:
        """`slice_bytes` are parked at a time: returning pages takes the lock, and serving must not
        wait for it. `owns`: serving's half of the page is ours to write."""
        self._page = page
        self._parking = parking
        self._headroom = headroom
        self._guard = guard
        self._slice = max(1, slice_bytes // parking.block_bytes)
        self.claim = self.revision = 0
        """Of the claim that the quota respects."""
        self.claimant: Writer | None = None
        self.handing_over = self.bringing = False
        """There is more to park, or there are more pages to bring."""
        self._bring_at = -math.inf
        self.owns = owns
        self.killed = 0
        self._suspicion = Suspicion(PATIENCE)

    def look(
        self,
        clock: Callable[[], float],
        publish: Callable[[bool], None],
        said: Callable[[str], None],
    ) -> None:
        """What serving's second thread does whenever it has caught up. `publish` is told whether
        the rollout engine waits for an answer; `said` why that engine is killed.

        The claim comes first, so that whatever fails behind it, serving gets what is given back.
        """
        news = self.respect(force=self.handing_over)
        now = clock()
        self.stand(now)
        if self.owns:
            if self._page.mend(clock):  # the node does so too, if there is one
                logger.error("rose: the page was damaged")
            self.defend(now, said)
            publish(news)
        if now >= self._bring_at:
            self._bring_at = now + BRING_S
            self.bringing = self._parking.bring(max(1, BRING // self._parking.block_bytes))

    def respect(self, *, force: bool = False) -> bool:
        """Keep the quota at what the rollout engine's claim leaves; True when a new claim is."""
        page, parking = self._page, self._parking
        reading = page.rollout()
        if reading is not None and page.processes.alive(reading.writer):
            claim, revision = reading.facts.kv_claim, reading.facts.kv_revision
            self.claimant = reading.writer
        elif self.claimant is not None and page.processes.alive(self.claimant):
            return False  # torn, lying or emptied half of a live engine: keep what is in force
        elif reading is None and page.rollout_writer_alive():
            claim, revision = page.kv_total, 0  # never read yet: assume the worst
        else:
            claim, revision = 0, 0
        quota = serving_quota(
            page.kv_total, claim, self._headroom, parking.blocks * parking.block_bytes
        )
        wanted = quota // parking.block_bytes
        in_force = (claim, revision) == (self.claim, self.revision)
        if in_force and parking.usable == wanted and not force:
            return False
        slice_end = max(wanted, parking.usable - self._slice)
        with self._guard:
            reached = parking.set_usable(slice_end)
        self.handing_over = reached == slice_end > wanted
        if reached > wanted:
            return False  # more to park, or requests hold it: not acknowledged, rollout waits
        self.claim, self.revision = claim, revision
        return True

    def stand(self, now: float) -> None:
        """Serving's half of the page is ours, or we say that there are two of us."""
        self.owns = self.owns or self._page.own("serving")
        if not self.owns:
            self._page.intrude(now)

    def defend(self, now: float, said: Callable[[str], None]) -> None:
        """Take memory back from a rollout engine that does not let go."""
        why, suspect = self._suspicion.stuck(self._page, now), self._suspicion.suspect
        if why is None or suspect is None:
            return
        said(why)
        self._suspicion.start_anew()
        self.killed += 1
        self._page.processes.kill(suspect)
