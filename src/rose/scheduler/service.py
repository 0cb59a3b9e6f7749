"""The scheduler as a running thing: turns go to engines and come back, over HTTP.

    clients -> frontdoor -> submit --+                      +--> engine_client -> engines
                                     +-> core.Scheduler  ---+
    ledger  <- what changed  <-------+                      +<-- chunks, failures

Every event is told to the core, then the core is asked what to do: that is the whole loop. One task
per attempt reads what an engine sends; one task asks the engines how they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import msgspec

from rose.scheduler import engine_client, turn
from rose.scheduler.core import Scheduler, Start, Stop
from rose.scheduler.engine_client import Broken, Refused
from rose.scheduler.fleet import UNKNOWN, Engine
from rose.scheduler.ledger import Ledger
from rose.scheduler.nodes import Nodes
from rose.scheduler.provisioner import KEEP_S
from rose.scheduler.turn import Ask, Cut, State, Turn
from rose.scheduler.weights import Leader

log = logging.getLogger("rose.scheduler")

TICK_S = 0.25
"""How often stalls and suspicions are looked at when nothing else happens."""
LOOK_S = 2.0
"""How often engines are asked how they are."""
LOOK_TIMEOUT_S = 5.0
GONE_AFTER = 3
"""Looks that fail one after the other before an engine is taken for gone."""
MOST_FAILURES = 5
"""Of one turn, answered by engines that are there."""
KEEP_EVERY_S = 0.5
"""How often a running turn's tokens are written to the ledger."""


class Service:
    def __init__(
        self,
        core: Scheduler,
        ledger: Ledger,
        *,
        grace_s: float,
        most_borrowed: int,
        keep_s: float = KEEP_S,
    ) -> None:
        """`grace_s`: how long a request with an id of its client's goes on without it; `keep_s`:
        how long a borrowed device is kept that is not needed."""
        self.core = core
        self.nodes = Nodes(core, most_borrowed, keep_s)
        self.reshuffled = asyncio.Event()
        """Set, and replaced, when other devices are wanted than before: nodes that wait for news
        are told."""
        self.updates = asyncio.Lock()
        """Of those who change engines' weights: one at a time, they have an order."""
        self.leader = Leader(core, self.updates)
        self.ledger = ledger
        self.grace_s = grace_s
        self.listeners: Counter[str] = Counter()
        """Clients that wait for a turn."""
        self.stopping = asyncio.Event()
        """Who waits is sent away; turns stay in the ledger."""
        self.session: aiohttp.ClientSession
        self._attempts: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._kept: dict[str, float] = {}
        self._misses: dict[str, int] = {}
        self.contexts: dict[str, int] = {}
        """Tokens of jobs' models, once they were asked for."""
        self._again: asyncio.Handle | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._restore()
        async with engine_client.open_session() as self.session, asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(loop)
                for loop in (self._tick(), self._look(), self.leader.run(self.session))
            ]
            try:
                yield
            finally:
                for task in (*loops, *self._attempts.values()):
                    task.cancel()
                self.keep_all()
                self.ledger.close()

    def _restore(self) -> None:
        for kept in self.ledger.turns():
            if kept.ask.job in self.core.jobs:
                self.core.restore(kept, time.monotonic())

    # ---- turns

    def submit(self, ask: Ask, *, again: bool) -> Turn:
        """A turn that is known by its id is that turn, running or over; `again`: it may be."""
        if again:
            known = self.core.turns.get(ask.id) or self.ledger.find(ask.id)
            if known is not None and (known.over or ask.id in self.core.turns):
                return known
        taken = self.core.submit(ask, time.monotonic())
        self.ledger.keep(taken)
        self.kick()
        return taken

    async def over(self, taken: Turn) -> None:
        if not taken.over:
            await self._ends.setdefault(taken.ask.id, asyncio.Event()).wait()

    def news(self, taken: Turn) -> asyncio.Event:
        """Set when something of the turn changes from now on, or it is over."""
        if taken.over:
            over = asyncio.Event()
            over.set()
            return over
        return self._news.setdefault(taken.ask.id, asyncio.Event())

    def cancel(self, taken: Turn) -> None:
        if taken.over:
            return
        self.core.cancel(taken, time.monotonic())
        self._changed(taken)
        self.kick()

    def kick(self) -> None:
        """Do what the core wants done now."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for action in self.core.decide(time.monotonic()):
            match action:
                case Start():
                    number = action.turn.attempt
                    key = (action.turn.ask.id, number)
                    _tell(action.turn, logging.DEBUG, "placed", engine=action.engine.id)
                    task = asyncio.create_task(self._attempt(action, number))
                    self._attempts[key] = task
                    task.add_done_callback(partial(self._attempt_ended, key))
                case Stop():
                    if (
                        going := self._attempts.get((action.turn.ask.id, action.attempt))
                    ) is not None:
                        going.cancel()
        if self.core.unfinished:
            self._again = asyncio.get_running_loop().call_soon(self.kick)

    async def _attempt(self, start: Start, number: int) -> None:
        """One request to an engine: closing the connection is what ends it there."""
        taken, engine, core = start.turn, start.engine, self.core
        try:
            body = turn.request(taken, start.salt)
            async for chunk in engine_client.generate(self.session, engine.url, body, {}):
                core.arrived(taken, number, chunk, time.monotonic())
                self._changed(taken)
            core.cut(taken, number, Cut.REVOKED, time.monotonic())  # nothing, if it has ended
        except Refused as error:
            core.refuse(taken, number, error.status, str(error), time.monotonic())
        except Broken as error:
            _tell(taken, logging.WARNING, "broken", engine=engine.id, why=str(error))
            self._break(taken, number, error)
        self._changed(taken)
        self.kick()

    def _break(self, taken: Turn, number: int, error: Broken) -> None:
        """An engine failed a turn: another one may not. If several say that they cannot, it is the
        turn."""
        now = time.monotonic()
        if error.answered and taken.cuts.count(Cut.FAILED) + 1 >= MOST_FAILURES:
            self.core.refuse(taken, number, 500, str(error), now)
        else:
            self.core.cut(taken, number, Cut.FAILED if error.answered else Cut.LOST, now)

    def _attempt_ended(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._attempts[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a defect: turn %s", key[0], exc_info=error)

    def _changed(self, taken: Turn) -> None:
        if (event := self._news.pop(taken.ask.id, None)) is not None:
            event.set()
        now = time.monotonic()
        if taken.over:
            if taken.ask.id not in self.core.turns:
                return  # it was over before
            if (end := self._ends.pop(taken.ask.id, None)) is not None:
                end.set()
            self._kept.pop(taken.ask.id, None)
            self.ledger.keep(taken)
            self.core.forget(taken)
            plain = taken.state == State.DONE and not taken.cuts
            _tell(
                taken,
                logging.DEBUG if plain else logging.INFO,
                str(taken.state),
                tokens=len(taken.tokens),
                cuts=[str(why) for why in taken.cuts],
                why=taken.error or taken.finish,
            )
        elif now - self._kept.get(taken.ask.id, 0.0) > KEEP_EVERY_S:
            self._kept[taken.ask.id] = now
            self.ledger.keep(taken)

    def keep_all(self) -> None:
        for taken in self.core.turns.values():
            self.ledger.keep(taken)

    # ---- engines

    async def anybody(self, job: str) -> Engine:
        """An engine to ask about a job's model, whosever weights it has; waits for one."""
        while True:
            usable = [e for e in self.core.engines.values() if e.serves(job)]
            alive = [e for e in usable if not self._misses.get(e.id)]
            if alive or usable:
                return min(alive or usable, key=lambda e: len(e.turns))
            await asyncio.sleep(TICK_S)

    async def ask(self, job: str, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Ask any engine; another one while they fail, unless they answer that they cannot."""
        failures = 0
        while True:
            engine = await self.anybody(job)
            try:
                status, data = await engine_client.call(
                    self.session, method, engine.url + path, body, 60.0
                )
                failures += 1
                if status < 500 or failures >= MOST_FAILURES:
                    return status, data
                log.warning("%s%s: %d", engine.url, path, status)
            except Broken as error:
                self._misses[engine.id] = self._misses.get(engine.id, 0) + 1
                log.warning("%s", error)
            await asyncio.sleep(TICK_S)

    async def context(self, job: str) -> int:
        """Tokens of the model's context."""
        if job not in self.contexts:
            status, data = await self.ask(job, "GET", "/v1/models", None)
            models = msgspec.json.decode(data).get("data", []) if status == 200 else []
            found = [m.get("max_model_len") for m in models if m.get("max_model_len")]
            if not found:
                return 1 << 30
            self.contexts[job] = int(found[0])
        return self.contexts[job]

    async def everybody(self, job: str, method: str, path: str, body: bytes | None) -> list[Any]:
        """Ask all engines of a job; [(engine, status, data)]. Those that fail are left out."""

        async def one(engine: Engine) -> Any:
            try:
                return engine, *await engine_client.call(
                    self.session, method, engine.url + path, body, 300.0
                )
            except Broken as error:
                log.warning("%s", error)
                return None

        asked = await asyncio.gather(*map(one, self.engines_of(job)))
        return [found for found in asked if found is not None]

    def engines_of(self, job: str) -> list[Engine]:
        return [e for e in self.core.engines.values() if self.core.jobs[job].owns(e)]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            before = self.nodes.wanted
            self.nodes.decide(time.monotonic())
            if self.nodes.wanted != before:
                self.reshuffled.set()
                self.reshuffled = asyncio.Event()
            self.kick()

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*(self._look_at(e) for e in list(self.core.engines.values())))
            self.kick()
            await asyncio.sleep(LOOK_S)

    async def _look_at(self, engine: Engine) -> None:
        """Is it there, and with which weights?"""
        known = engine.version
        try:
            status, data = await engine_client.call(
                self.session, "GET", f"{engine.url}/weight_info", None, LOOK_TIMEOUT_S
            )
            if status == 200:
                version = str(msgspec.json.decode(data).get("weight_version") or "")
                if version != known == engine.version:  # nobody has led it meanwhile
                    engine.version = version
                    self.core.prefixes.forget(engine.id)
            elif status >= 500:
                raise Broken(f"{engine.url}: {status}")
            if engine.capacity == UNKNOWN:
                engine.capacity = await engine_client.capacity(self.session, engine.url) or UNKNOWN
            self._misses.pop(engine.id, None)
            if not engine.reported:
                engine.active = True
        except (Broken, msgspec.DecodeError) as error:
            misses = self._misses[engine.id] = self._misses.get(engine.id, 0) + 1
            if misses == GONE_AFTER:
                log.warning("engine %s is gone: %s", engine.id, error)
                engine.active = False
                self.core.clear(engine, Cut.GONE, time.monotonic())


def _tell(taken: Turn, level: int, what: str, **facts: Any) -> None:
    """A line of log about a turn."""
    if log.isEnabledFor(level):
        ids = {"job": taken.ask.job, "turn": taken.ask.id, "trajectory": taken.ask.trajectory}
        log.log(level, what, extra={"facts": ids | facts})
