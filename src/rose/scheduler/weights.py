"""Leads engines to their job's current weights, also those that come late or come back.

A job's *source* says where its versions are published: from the command line, and then what is
newest there is current; or from a trainer's own `init_weight_transfer_engine` call, and then
current is what it finished last. Engines fetch and stage by themselves; each one that is behind is
led on its own: told of the source if it follows none or another, waited for until all its ranks
have the version staged, committed in a short pause while its turns keep what they have. Jobs with
weights of their own have engines of their own (`sharing`); the turns of one that changes hands go
on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any, NamedTuple

import aiohttp

from rose.scheduler import sharing
from rose.scheduler.core import Scheduler
from rose.scheduler.fleet import Engine
from rose.scheduler.job import Job
from rose.scheduler.sharing import MOVE_S, Claim, Shared
from rose.scheduler.turn import Cut
from rose.transfer.errors import TransferError
from rose.transfer.store import Store, StoreError, open_store
from rose.transfer.vllm.client import EngineClient

log = logging.getLogger("rose.scheduler")

LOOK_S = 0.5
"""How often is looked for new versions, and for engines that are behind."""
STAGED_S = 600.0
"""For an engine that joins this may be the whole model over a slow link."""
AGAIN_S = 5.0
"""After a failure; the engine gets no turns meanwhile if it is too far behind."""
HOLD_S = 600.0
"""A trainer that began an update and is not heard of again keeps engines that long."""


class Source(NamedTuple):
    """As `init_weight_transfer_engine` of the backend `rose` takes it."""

    store: str
    job: str
    folder: str

    @property
    def where(self) -> tuple[str, str]:
        return self.store, self.job


class Leader:
    """`updates`: held while an engine commits; a trainer's call to all engines holds it too."""

    def __init__(self, core: Scheduler, updates: asyncio.Lock) -> None:
        self.sources: dict[str, Source] = {}
        self._watched: dict[str, Store] = {}
        """Of jobs whose newest version in their store is current."""
        self._core = core
        self._updates = updates
        self._leading: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._held: dict[str, float] = {}
        self.paused: set[str] = set()
        """Jobs whose engines a trainer has paused: who leaves them now would stay so."""
        self._away: set[str] = set()
        self._moved = -math.inf

    def watch(self, job: str, source: Source) -> None:
        """Lead the job's engines to whatever is newest; ValueError if that cannot be a store."""
        self._watched[job] = open_store(source.store, source.job)
        self._core.jobs[job].asked = False
        self.follow(job, source)

    def follow(self, job: str, source: Source | None) -> None:
        """The job's versions are of this source, or no longer of any; whoever says what is
        current."""
        self.sources.pop(job, None)
        if source is not None:
            self.sources[job] = source
        self._core.jobs[job].source = source.where if source is not None else None
        self.share_out()

    def share_out(self) -> None:
        """Say which engine is for which source."""
        jobs, engines, now = self._core.jobs, list(self._core.engines.values()), time.monotonic()
        claims = {}
        for where in {source.where for source in self.sources.values()}:
            of_it = [jobs[name] for name, source in self.sources.items() if source.where == where]
            claims[where] = Claim(
                sum(job.share for job in of_it),
                sum(job.max_borrowed for job in of_it),
                sum(job.waiting for job in of_it),
                sum(job.running for job in of_it),
            )
        owners = sharing.share_out(
            claims,
            [self._shared(engine) for engine in engines],
            may_move=now - self._moved > MOVE_S,
        )
        for engine in engines:
            owner = owners.get(engine.id)
            if None not in (engine.owner, owner) and engine.owner != owner:
                self._moved = now
                self._core.clear(engine, Cut.GONE, now)
            engine.owner = owner

    def _shared(self, engine: Engine) -> Shared:
        allowed = {s.where for name, s in self.sources.items() if engine.serves(name)}
        if engine.owner in allowed and self._is_changing(engine):
            allowed = {engine.owner}
        return Shared(
            engine.id,
            engine.owner,
            frozenset(allowed),
            engine.tokens_per_s,
            engine.borrowed,
            len(engine.turns),
        )

    def _is_changing(self, engine: Engine) -> bool:
        """Somebody is in the middle of what only he can end: an update, or a pause."""
        owners = [name for name, source in self.sources.items() if source.where == engine.owner]
        told = any(self._is_held(name) or name in self.paused for name in owners)
        return told or engine.id in self._leading

    def hold(self, job: str) -> None:
        """A trainer has begun to update the job's engines itself; that takes it several calls."""
        self._held[job] = time.monotonic() + HOLD_S

    def release(self, job: str) -> None:
        self._held.pop(job, None)

    def _is_held(self, job: str) -> bool:
        return time.monotonic() < self._held.get(job, 0.0)

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Until cancelled."""
        try:
            while True:
                self.share_out()
                for name, source in list(self.sources.items()):
                    if name in self._watched:
                        await self._look(name)
                    self._lead_all(session, self._core.jobs[name], source)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._leading.values():
                task.cancel()

    async def _look(self, name: str) -> None:
        job = self._core.jobs[name]
        try:
            steps = await asyncio.to_thread(self._watched[name].steps)
        except (StoreError, TransferError, OSError) as error:
            if job.name not in self._away:
                log.warning("weights of job %s: %s", job.name, error)
            self._away.add(job.name)
            return
        finally:
            job.asked = True
        self._away.discard(job.name)
        newest = max((step.version for step in steps), default=None)
        if newest is not None and newest != job.version:
            if job.version is None:
                for engine in self._core.engines.values():
                    engine.due[job.name] = newest
            job.lead(newest)
            log.info("weights", extra={"facts": {"job": job.name, "version": newest}})

    def _lead_all(self, session: aiohttp.ClientSession, job: Job, source: Source) -> None:
        if self._is_held(job.name):
            return
        now = time.monotonic()
        for engine in self._core.engines.values():
            there = (engine.version, engine.source) == (str(job.version), source.where)
            behind = job.version is not None and not there
            waits = engine.id in self._leading or now < self._not_before.get(engine.id, 0.0)
            if behind and engine.owner == source.where and not waits:
                client = EngineClient(session, engine.url)
                task = asyncio.create_task(self._lead(client, engine, source, job))
                self._leading[engine.id] = task
                task.add_done_callback(lambda _, id_=engine.id: self._leading.pop(id_))  # type: ignore[misc]

    async def _lead(self, client: EngineClient, engine: Engine, source: Source, job: Job) -> None:
        assert job.version is not None
        facts: dict[str, Any] = {"engine": engine.id}
        version = job.version
        try:
            await _introduce(client, source, version)
            version = await client.staged(version, STAGED_S, newer=True)
            await self._confirm(job, version)
            async with self._updates:
                if self._is_held(job.name):
                    return
                updated = await client.commit(version)
        except (TransferError, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("not led: %s", error, extra={"facts": facts})
            self._not_before[engine.id] = time.monotonic() + AGAIN_S
            return
        engine.version, engine.source = str(version), source.where
        self._core.prefixes.forget(engine.id)
        facts |= {"version": version, "pause_ms": round(1e3 * updated.pause_s)}
        log.info("led", extra={"facts": facts})

    async def _confirm(self, job: Job, version: int) -> None:
        """A version newer than the current one may just have been published; if the store does not
        have it, it is of another run that left its copy in the folder."""
        assert job.version is not None
        if version > job.version and job.name in self._watched:
            await self._look(job.name)
            if version > job.version:
                raise TransferError(
                    f"version {version} is not in {self.sources[job.name].store}, which ends with "
                    f"{job.version}: the engine's folder has a copy of another run"
                )


async def _introduce(client: EngineClient, source: Source, version: int) -> None:
    """An engine that follows no source, as it was restarted, or another one, is told."""
    try:
        ranks = await client.ranks(version)
    except TransferError:
        ranks = []
    if not ranks or {(rank["store"], rank["job"]) for rank in ranks} != {source.where}:
        await client.init(*source)
