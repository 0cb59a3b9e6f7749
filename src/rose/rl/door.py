"""The agents' side of the front door: turns. (New weights: `weight_sync`.)

A turn has an id that its trainer would choose again after a restart, so whatever breaks, asking
again with it brings the same turn: the one that ran, or its result (`scheduler/ledger.py`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from rose.net import bearer
from rose.rl.types import Said

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CONNECT_S = 10.0


class DoorError(RuntimeError):
    """The front door said no, or did not come back in time."""


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    max_tokens: int = 64
    """Of a turn."""


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] = []


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decode = msgspec.json.Decoder(_Answer).decode


class Door:
    """`async with Door(url) as door`. `patience_s`: for a scheduler that is away, each time."""

    def __init__(self, url: str, *, secret: str = "", patience_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | bearer(secret)
        self._patience_s = patience_s

    async def __aenter__(self) -> Door:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        *,
        id_: str,
        trajectory: str,
        seed: int,
        stop: int,
        last: bool = False,
    ) -> Said:
        """One turn; waits as long as it takes."""
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": seed,
            "stop_token_ids": [stop],
            "logprobs": 0,
        }
        if last:
            params["extra_args"] = {"rose_last_turn": 1}
        body = {"token_ids": tokens, "sampling_params": params}
        headers = {"X-Request-ID": id_, "X-Session-ID": trajectory}
        answer = _decode(await self._post("inference/v1/generate", body, headers))
        (choice,) = answer.choices
        found = [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
        if len(found) != len(choice.token_ids):
            raise DoorError(f"turn {id_}: {len(choice.token_ids)} tokens, {len(found)} log-probs")
        versions = tuple(int(s.version) for s in choice.weight_versions if s.version.isdigit())
        return Said(choice.token_ids, found, choice.finish_reason, versions)

    async def _post(
        self, route: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> bytes:
        """Asks again while the scheduler is away or says that it cannot now."""
        data = msgspec.json.encode(body)
        deadline, pause = time.monotonic() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                async with self._session.post(
                    f"{self.url}/{route}", data=data, headers=self._headers | (headers or {})
                ) as answer:
                    found = await answer.read()
                    if answer.status == 200:
                        return found
                    why = f"{answer.status} {found[:500].decode(errors='replace')}"
                    if answer.status not in AGAIN:
                        raise DoorError(f"{self.url}/{route}: {why}")
            except (aiohttp.ClientError, OSError) as error:
                why = f"{type(error).__name__} {error}"
            if time.monotonic() > deadline:
                raise DoorError(f"{self.url}/{route} for {self._patience_s:.0f} s: {why}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
