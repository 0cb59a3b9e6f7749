"""One client's request while it is being answered: its turns, and whether anybody still listens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from rose.scheduler.core import Full
from rose.scheduler.frontdoor.errors import Wrong
from rose.scheduler.service import Service
from rose.scheduler.turn import Ask, State, Turn

T = TypeVar("T")


class Left(Exception):
    """The client is gone."""


class Stopping(Wrong):
    """The scheduler is being stopped: turns go on after its restart."""

    def __init__(self) -> None:
        said = "the scheduler is being stopped: ask again, with the same X-Request-ID"
        super().__init__(503, said, "ServiceUnavailableError")


class Exchange:
    def __init__(self, service: Service, request: Request, job: str) -> None:
        self.service = service
        self.job = job
        given = request.headers.get("x-request-id", "")
        self.again = bool(given)
        """The client may come back for it."""
        self.id = f"{job}/{given or uuid.uuid4().hex}"
        self.trajectory = request.headers.get("x-session-id", "")
        self.turns: list[Turn] = []
        self.handed_over = False
        """To an answer that will end it."""
        self._request = request

    def begin(self, asks: list[Ask]) -> list[Turn]:
        try:
            for ask in asks:
                self.turns.append(self.service.submit(ask, again=self.again))
                self.service.listeners[ask.id] += 1
        except Full as error:
            raise Wrong(429, str(error), "RateLimitError") from error
        return self.turns

    async def finish(self) -> None:
        """All turns over; raises what an engine says against them."""
        await self.listened(self._all_over())
        for turn in self.turns:
            _check(turn)

    async def _all_over(self) -> None:
        for turn in self.turns:
            await self.service.over(turn)

    async def listened(self, work: Awaitable[T]) -> T:
        """Do it as long as the client listens."""
        doing = asyncio.ensure_future(work)
        gone = asyncio.create_task(self._gone())
        stopping = asyncio.create_task(self.service.stopping.wait())
        try:
            await asyncio.wait({doing, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise Left if gone.done() else Stopping
            return doing.result()
        finally:
            for task in (gone, stopping, doing):
                task.cancel()

    async def stream(self) -> AsyncIterator[tuple[int, Turn, int, bool]]:
        """What comes of the turns, as it comes: number, turn, tokens known before, whether over."""
        sent, open_ = [0] * len(self.turns), set(range(len(self.turns)))
        while open_:
            news = [self.service.news(self.turns[i]) for i in open_]
            for i in sorted(open_):
                turn = self.turns[i]
                if len(turn.tokens) == sent[i] and not turn.over:
                    continue
                _check(turn)
                before, sent[i] = sent[i], len(turn.tokens)
                if turn.over:
                    open_.discard(i)
                yield i, turn, before, turn.over
            await first_of([*news, self.service.stopping])
            if self.service.stopping.is_set():
                raise Stopping

    async def _gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    def end(self) -> None:
        for turn in self.turns:
            self.service.listeners[turn.ask.id] -= 1

    def give_up(self) -> None:
        """Turns that nobody else listens to."""
        for turn in self.turns:
            if not self.service.listeners[turn.ask.id]:
                del self.service.listeners[turn.ask.id]
                self.service.cancel(turn)


@asynccontextmanager
async def exchange(going: Exchange) -> AsyncIterator[None]:
    """Whatever ends it, no turn is left that nobody wants; who may come back has some time to."""
    try:
        yield
    except (Left, asyncio.CancelledError, GeneratorExit):
        going.end()
        later = going.service.grace_s if going.again else 0.0
        asyncio.get_running_loop().call_later(later, going.give_up)
        raise
    except Stopping:
        going.end()
        raise
    except BaseException:
        going.end()
        going.give_up()
        raise
    if not going.handed_over:
        going.end()
        going.give_up()


def _check(turn: Turn) -> None:
    """Raise what an engine has against it. A turn that was aborted ends with what it has."""
    if turn.state == State.ABORTED and turn.error:
        raise Wrong(turn.status, turn.error)


async def first_of(events: list[asyncio.Event], seconds: float | None = None) -> None:
    """Until one of them is set, or so long."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
