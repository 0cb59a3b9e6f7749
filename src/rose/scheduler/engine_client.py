"""Talking to one engine, real or emulated: vLLM's token-in-token-out route, streamed.

Differences between engine releases' answers are dealt with here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from rose.scheduler.turn import Chunk, Span

CONNECT_S = 5.0
DATA, END = b"data: ", b"data: [DONE]"


class _Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _Span(msgspec.Struct):
    start: int
    version: str | int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Span] | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """The engine finds the request itself wrong."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Broken(Exception):
    """The engine, or the way to it, failed. `answered`: it was there, and said so itself."""

    answered = False


class Failed(Broken):
    answered = True


def open_session() -> aiohttp.ClientSession:
    """For all engines: as many connections as turns, and no time limit but on connecting."""
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
    return aiohttp.ClientSession(timeout=timeout, connector=connector)


async def call(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes | None, timeout_s: float
) -> tuple[int, bytes]:
    """Any other route, whole."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s, connect=CONNECT_S)
    try:
        async with session.request(
            method, url, data=body, headers=headers, timeout=timeout
        ) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Broken(f"{url}: {type(error).__name__} {error}") from error


async def capacity(session: aiohttp.ClientSession, url: str) -> int | None:
    """Tokens of an engine's KV cache, as its metrics say."""
    status, data = await call(session, "GET", f"{url}/metrics", None, CONNECT_S)
    line = re.search(rb"^vllm:cache_config_info\{(.*)\}", data, re.MULTILINE)
    if status != 200 or line is None:
        return None
    said = dict(re.findall(rb'(\w+)="(\d+)"', line[1]))
    tokens = int(said.get(b"block_size", 0)) * int(said.get(b"num_gpu_blocks", 0))
    return tokens or None


async def generate(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[Chunk]:
    """The chunks of an attempt. Ends without a `finish` if the engine said none."""
    try:
        async with session.post(
            f"{url}/inference/v1/generate",
            data=_encode(body),
            headers={"Content-Type": "application/json", **headers},
        ) as answer:
            if answer.status != 200:
                _fail(answer.status, await answer.text())
            rest = b""
            async for data in answer.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    if event != END and (chunk := _chunk(event)) is not None:
                        yield chunk
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Broken(f"{url}: {type(error).__name__} {error}") from error


def _fail(status: int, text: str) -> None:
    if 400 <= status < 500 and status not in (404, 408, 409, 425, 429):
        raise Refused(status, _message(text))
    raise Failed(f"{status} {_message(text)[:500]}")


def _message(text: str) -> str:
    try:
        said = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text[:500]
    error = said.get("error", said) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _name_token(entry: dict[str, Any]) -> None:
    """vLLM 0.32 says `token_id`, releases before it `token`, which clients still look for: both."""
    if "token" not in entry:
        entry["token"] = f"token_id:{entry['token_id']}"
    elif "token_id" not in entry:
        entry["token_id"] = int(entry["token"].removeprefix("token_id:"))
    for other in entry.get("top_logprobs") or ():
        _name_token(other)


def _chunk(data: bytes) -> Chunk | None:
    try:
        event = _decode(memoryview(data)[len(DATA) :])
    except msgspec.DecodeError as error:
        raise Broken(f"not an event: {error}") from error
    if event.error is not None:
        _fail(event.error.get("code") or 500, str(event.error.get("message", event.error)))
    cached = None
    if event.usage is not None and event.usage.prompt_tokens_details is not None:
        cached = event.usage.prompt_tokens_details.cached_tokens
    if not event.choices:
        return None if cached is None else Chunk([], cached=cached)
    choice = event.choices[0]
    logprobs = choice.logprobs.content if choice.logprobs is not None else None
    for entry in logprobs or ():
        _name_token(entry)
    spans = None
    if choice.weight_versions:
        spans = [Span(one.start, str(one.version)) for one in choice.weight_versions]
    return Chunk(
        choice.token_ids or [],
        logprobs,
        choice.finish_reason,
        choice.stop_reason,
        spans,
        cached,
    )
