"""Who may play: so many episodes at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush


class Places:
    """As a semaphore, but of those that wait the urgent ones go first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._number = 0

    @asynccontextmanager
    async def one(self, *, urgent: bool) -> AsyncIterator[None]:
        await self._take(urgent)
        try:
            yield
        finally:
            self._give()

    async def _take(self, urgent: bool) -> None:
        if self._free:
            self._free -= 1
            return
        self._number += 1
        given = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (not urgent, self._number, given))
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self._give()
            raise

    def _give(self) -> None:
        while self._waiting:
            *_, given = heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1
