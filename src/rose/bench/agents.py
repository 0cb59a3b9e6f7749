"""Agents against a URL: every trajectory asks for a turn, waits for its tool, asks again.

As a trainer's environment workers do, over HTTP, and as they do they ask again with the same
`X-Request-ID` when the server goes away. Tokens are those of `emulated`, so every answer can be
checked.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import aiohttp
import msgspec

from rose.bench.emulated import TAIL, VOCABULARY, next_token
from rose.bench.trajectories import Trajectory

RETRY_S, RETRY_LAST_S = 0.05, 1.0
"""Twice as long every time, and not all at the same time, as clients do it."""
PATIENCE_S = 600.0
"""A turn that has not been answered for so long is lost."""


class Asked(NamedTuple):
    id: str
    began: float
    ended: float


@dataclass
class Record:
    """What came of it; times by the monotonic clock."""

    asked: list[Asked] = field(default_factory=list)
    wrong: int = 0
    """Answers with other tokens than an undisturbed engine's, or another number of them."""
    lost: int = 0
    """Turns that were never answered."""
    retries: int = 0
    began: float = 0.0
    ended: float = 0.0

    @property
    def makespan_s(self) -> float:
        return self.ended - self.began

    def after(self, seconds: float) -> Record:
        """Only the turns that began later than that."""
        began = self.began + seconds
        return replace(self, asked=[one for one in self.asked if one.began >= began], began=began)


class Agents:
    """`url_of` says where a trajectory's turns go; `name` keeps ids of several runs apart."""

    def __init__(self, name: str, url_of: Callable[[int], str], *, stream: bool = False) -> None:
        self.record = Record()
        self._name = name
        self._url_of = url_of
        self._stream = stream
        self._random = random.Random(0)

    async def run(self, trajectories: Sequence[Trajectory], seconds: float | None = None) -> Record:
        """All at once, to their end, or until the time is over."""
        record = self.record
        record.began = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            going = [
                asyncio.create_task(self._live(session, number, one))
                for number, one in enumerate(trajectories)
            ]
            await asyncio.wait(going, timeout=seconds)
            for task in going:
                task.cancel()
            for outcome in await asyncio.gather(*going, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome
        record.ended = time.monotonic()
        return record

    async def _live(self, session: aiohttp.ClientSession, number: int, one: Trajectory) -> None:
        tokens = first_prompt(one)
        for turn_number, turn in enumerate(one.turns):
            id_ = f"{self._name}.{number}.{turn_number}"
            made = await self._ask(session, number, id_, tokens, turn.output)
            if made is None:
                self.record.lost += 1
                return
            self.record.wrong += not right(tokens, made, turn.output)
            tokens = tokens + made + observed(number, turn.observation)
            await asyncio.sleep(turn.tool_s)

    async def _ask(
        self, session: aiohttp.ClientSession, number: int, id_: str, prompt: list[int], output: int
    ) -> list[int] | None:
        sampling = {"max_tokens": output, "ignore_eos": True}
        asked: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling}
        if self._stream:
            asked |= {"stream": True, "request_id": id_}
        headers = {
            "Content-Type": "application/json",
            "X-Request-ID": id_,
            "X-Session-ID": f"{self._name}.{number}",
        }
        body, began, pause = msgspec.json.encode(asked), time.monotonic(), RETRY_S
        while time.monotonic() - began < PATIENCE_S:
            try:
                url = f"{self._url_of(number)}/inference/v1/generate"
                async with session.post(url, data=body, headers=headers) as answer:
                    data = await answer.read()
                if answer.status == 200:
                    self.record.asked.append(Asked(id_, began, time.monotonic()))
                    return _tokens(data, stream=self._stream)
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # it is counted, and asked again
            self.record.retries += 1
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
            pause = min(2 * pause, RETRY_LAST_S)
        return None


def first_prompt(one: Trajectory) -> list[int]:
    """The same for all of a group."""
    return [(one.group * 7919 + k * 31) % VOCABULARY for k in range(one.prompt)]


def observed(number: int, count: int) -> list[int]:
    """What a tool says: to every trajectory something else, also to samples of one prompt."""
    return [(number * 104_729 + k * 37) % VOCABULARY for k in range(count)]


def right(prompt: list[int], made: list[int], wanted: int) -> bool:
    tokens = prompt[-TAIL:] + made
    before, start = len(prompt), len(tokens) - len(made)
    return len(made) == wanted and all(
        token == next_token(tokens[max(0, start + k - TAIL) : start + k], before + k)
        for k, token in enumerate(made)
    )


def _tokens(data: bytes, *, stream: bool) -> list[int]:
    if not stream:
        return list(msgspec.json.decode(data)["choices"][0]["token_ids"])
    made: list[int] = []
    for event in data.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in msgspec.json.decode(event[6:])["choices"]:
                made += choice["token_ids"]
    return made
