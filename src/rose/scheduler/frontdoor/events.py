"""A streamed answer: its turns are somebody's until it is sent, or its client leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rose.scheduler.frontdoor.errors import END, Wrong, describe, event
from rose.scheduler.frontdoor.exchange import Exchange, Left, exchange


class Events(StreamingResponse):
    def __init__(self, going: Exchange, events: AsyncIterator[bytes]) -> None:
        super().__init__(_with_errors(events), media_type="text/event-stream")
        self._going = going
        going.handed_over = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._going.handed_over = False
        try:
            async with exchange(self._going):
                await super().__call__(scope, receive, send)
                if not all(turn.over for turn in self._going.turns):
                    raise Left
        except Left:
            return


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What goes wrong after the first byte is an event."""
    try:
        async for each in events:
            yield each
    except Wrong as error:
        yield event({"error": describe(error.status, str(error), error.kind)})
        yield END
