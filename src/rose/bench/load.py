"""Open-loop load on an OpenAI-compatible server.

Every request is a task of its own, fired at its scheduled time whether or not earlier ones were
answered, over as many connections as that takes. Times count from the schedule; how late the
generator itself was is recorded beside them. What goes wrong with a request is a value in its
`Sample`: the run goes on.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rose.bench.arrivals import Request
from rose.bench.stats import Sample, Summary, summarise
from rose.executor.slo import Slo

VOCAB = (5, 255)
"""Random prompt ids come from this range by default: even a byte-level vocabulary holds it."""

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "state")
"""Common words, about one token each, for servers that refuse token-id prompts."""

PROBE_TIMEOUT_S = 60.0
"""A first request may meet a cold server (seconds of warm-up), not a dead one."""

KEEPALIVE_S = 2.0
"""Below the 5 s after which uvicorn drops an idle connection: a request sent into that race would
fail through no fault of the server."""

EXTRAS: tuple[dict[str, Any], ...] = (
    {
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""What is asked beyond the plain API, best first; the first one the server accepts is used."""


class LoadError(Exception):
    """A server that cannot be loaded at all, in one sentence for the user."""


class Refused(Exception):
    """The server answered with an error instead of, or within, a stream."""

    def __init__(self, status: int, message: str) -> None:
        self.where = "error in the stream" if status == 200 else f"HTTP {status}"
        super().__init__(f"{self.where}: {message}")
        self.status = status


@dataclass(frozen=True)
class Chunk:
    """One streamed event of a completion."""

    at: float
    tokens: int
    total_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


def open_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """Unlimited connections and no timeout: either would make the load wait for answers."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )


async def stream_completion(
    session: aiohttp.ClientSession, url: str, body: bytes
) -> AsyncIterator[Chunk]:
    """Chunks of one streamed completion as they arrive; raises Refused or aiohttp's errors.

    Tokens are counted by the server's running usage, else by token ids, else one per chunk.
    """
    now = asyncio.get_running_loop().time
    total = 0
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            raise Refused(answer.status, _reason(await answer.text()))
        async for data in _events(answer.content):
            event = _decoder.decode(data)
            if event.error is not None:
                raise Refused(200, _reason(data.decode()))
            choice = event.choices[0] if event.choices else _Choice()
            before = total
            if event.usage is not None and event.usage.completion_tokens is not None:
                total = max(total, event.usage.completion_tokens)
            elif choice.token_ids is not None:
                total += len(choice.token_ids)
            elif event.choices and (choice.text or choice.finish_reason is None):
                total += 1
            yield Chunk(
                at=now(),
                # Tokens a closing usage-only event adds were sent earlier, at unknown times.
                tokens=total - before if event.choices else 0,
                total_tokens=total,
                token_ids=tuple(choice.token_ids or ()),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Payloads of server-sent events; own buffer because aiohttp's readline caps a line."""
    buffer = b""
    async for piece in content.iter_any():
        *lines, buffer = (buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data != b"[DONE]":
                    yield data


def _reason(text: str) -> str:
    """The message inside an OpenAI-style error body, on one short line."""
    try:
        parsed = json.loads(text)
        inner = parsed.get("error", parsed)
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:300] or "no message"


@dataclass(frozen=True)
class Target:
    """A server that answered, its model, and the extras it accepts."""

    url: str
    model: str
    extras: dict[str, Any]

    def body(self, prompt: list[int] | str, max_tokens: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                **self.extras,
            }
        )


@dataclass(frozen=True)
class Prompts:
    """Random prompts: the one of request `index` depends on seed and index only."""

    seed: int = 0
    vocab: tuple[int, int] = VOCAB
    text: bool = False

    def make(self, index: int, tokens: int) -> list[int] | str:
        rng = np.random.default_rng((self.seed, index))
        if self.text:
            return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), tokens))
        ids: list[int] = rng.integers(*self.vocab, tokens).tolist()
        return ids


async def ask_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that `/v1/models` names."""
    try:
        async with session.get(f"{url}/v1/models") as answer:
            if answer.status != 200:
                reason = _reason(await answer.text())
                raise LoadError(f"{url}/v1/models answered HTTP {answer.status}: {reason}")
            return str((await answer.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise LoadError(f"no server answers at {url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise LoadError(f"{url}/v1/models names no model: name one with --model") from error


async def connect(
    session: aiohttp.ClientSession,
    url: str,
    model: str | None = None,
    prompts: Prompts | None = None,
) -> Target:
    """Find the model and the extras the server accepts, by one-token requests."""
    url = url.rstrip("/").removesuffix("/v1")
    prompt = (prompts or Prompts()).make(0, 4)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            model = model or await ask_model(session, url)
            for extras in EXTRAS:
                target = Target(url, model, extras)
                try:
                    async for _ in stream_completion(session, url, target.body(prompt, 1)):
                        pass
                    return target
                except Refused as error:
                    refusal = error
                    if error.status not in (400, 422):
                        break
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        raise LoadError(f"{url} does not stream completions: {describe(error)}") from error
    raise LoadError(f"{url} refuses a one-token completion of {model!r}: {refusal}")


@dataclass
class Progress:
    """Counters a live view may read while `run` goes on."""

    total: int = 0
    sent: int = 0
    done: int = 0

    @property
    def running(self) -> int:
        return self.sent - self.done


@dataclass(frozen=True)
class LoadResult:
    """All finished requests in schedule order, and how many were not finished or not sent."""

    samples: tuple[Sample, ...]
    slo: Slo
    span_s: float
    cut: int = 0
    unsent: int = 0

    def summary(self) -> Summary:
        return summarise(self.samples, self.slo, self.span_s, self.cut, self.unsent)

    def write(self, path: Path) -> None:
        """One JSON line per request."""
        with path.open("w", encoding="utf-8") as out:
            for sample in self.samples:
                row = asdict(sample) | {
                    "lag_s": sample.lag_s,
                    "ttft_s": sample.ttft_s,
                    "tpot_s": sample.tpot_s,
                    "max_gap_s": sample.max_gap_s,
                    "met_slo": sample.meets(self.slo),
                }
                out.write(json.dumps(row) + "\n")


@dataclass
class _Run:
    session: aiohttp.ClientSession
    target: Target
    start: float
    timeout_s: float
    on_sample: Callable[[Sample], None] | None
    progress: Progress
    samples: list[Sample] = field(default_factory=list)

    async def feed(self, requests: Sequence[Request], prompts: Prompts) -> None:
        """Fire every request at its time, then wait for the last answer."""
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                # Encoded before the sleep, so that its cost does not delay the send.
                prompt = prompts.make(index, request.prompt_tokens)
                body = self.target.body(prompt, request.output_tokens)
                await asyncio.sleep(max(0.0, self.start + request.arrival_s - now()))
                group.create_task(self.send(index, request, body))
                self.progress.sent += 1

    async def send(self, index: int, request: Request, body: bytes) -> None:
        now = asyncio.get_running_loop().time
        sent, times, total = now(), list[float](), 0
        reason: str | None = None
        error: str | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                async for chunk in stream_completion(self.session, self.target.url, body):
                    times += [chunk.at - self.start] * chunk.tokens
                    total = chunk.total_tokens
                    reason = chunk.finish_reason or reason
            if reason is None:
                error = "the stream ended without a finish reason"
            elif reason in ("abort", "error"):
                error = f"the server ended it: {reason}"
            elif not times:
                error = "no token came"
        except TimeoutError:
            error = f"timeout after {self.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, Refused, msgspec.DecodeError) as failure:
            error = describe(failure)
        sample = Sample(
            index=index,
            scheduled_s=request.arrival_s,
            sent_s=sent - self.start,
            finish_s=now() - self.start,
            prompt_tokens=request.prompt_tokens,
            output_tokens=total,
            token_s=tuple(times),
            finish_reason=reason,
            error=error,
        )
        self.samples.append(sample)
        self.progress.done += 1
        if self.on_sample is not None:
            self.on_sample(sample)


async def run(
    session: aiohttp.ClientSession,
    target: Target,
    requests: Sequence[Request],
    *,
    slo: Slo,
    prompts: Prompts | None = None,
    timeout_s: float = 120.0,
    on_sample: Callable[[Sample], None] | None = None,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Send every request at its time and wait for the answers, or until `stop` is set."""
    loop = asyncio.get_running_loop()
    counters = progress or Progress()
    counters.total = len(requests)
    state = _Run(session, target, loop.time(), timeout_s, on_sample, counters)
    feeding = asyncio.create_task(state.feed(requests, prompts or Prompts()))
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({feeding, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if feeding.done():
            feeding.result()
    finally:
        span = loop.time() - state.start
        feeding.cancel()
        stopping.cancel()
        await asyncio.gather(feeding, stopping, return_exceptions=True)
    ordered = tuple(sorted(state.samples, key=lambda s: s.index))
    return LoadResult(ordered, slo, span, counters.running, len(requests) - counters.sent)


def describe(error: BaseException) -> str:
    """One short line for an error that may print as nothing."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return " ".join(str(error).split()) or type(error).__name__
