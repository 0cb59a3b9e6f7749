"""Closed-loop rollouts: a fixed number of multi-turn trajectories kept in flight.

A trajectory is a prompt followed by turns; each turn generates tokens, waits for its tool
(think time), and appends an observation, so the prompt grows. The engine under test may be
revoked at any moment: a turn that ends with `abort`, or whose connection breaks, goes on from
its tokens so far (prompt + emitted ids, remaining budget), after a backoff when nothing came.
Greedy turns are thereby token-exact under any number of interruptions.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from rose.bench.arrivals import Fixed, Lengths
from rose.bench.load import (
    VOCAB,
    LoadError,
    Refused,
    ask_model,
    open_session,
    stream_completion,
)

BACKOFF_FIRST_S = 0.05
"""Short against a revocation, so that little idle time is lost when the engine comes back."""

BACKOFF_MAX_S = 1.0
"""Long enough that 100 waiting trajectories do not load a device that serves."""

RETRIED_STATUS = frozenset({200, 408, 409, 425, 429})
"""Refusals that pass with time, beside every 5xx; 200 is an error inside a stream."""


@dataclass(frozen=True)
class RolloutPlan:
    """What every trajectory does; trajectory i draws from (seed, i) only."""

    in_flight: int = 8
    turns: int = 4
    prompt_tokens: Lengths = field(default=Fixed(64))
    turn_tokens: Lengths = field(default=Fixed(64))
    observation_tokens: Lengths = field(default=Fixed(16))
    think_s: float = 0.0
    """Mean of the exponential tool latency between turns."""
    temperature: float = 1.0
    """0 is greedy; otherwise every turn has its own seed."""
    seed: int = 0
    vocab: tuple[int, int] = VOCAB
    trajectories: int | None = None
    """Stop by itself after this many; None goes on until `stop`."""
    stall_s: float = 120.0
    """A stream silent for this long counts as a broken connection."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request body, such as `priority` or `cache_salt`."""


class Turn(NamedTuple):
    """What a trajectory will do, whatever it is answered."""

    think_s: float
    """Before it."""
    heard: list[int]
    """Tokens that it adds to the context."""
    budget: int
    seed: int


def turns(plan: RolloutPlan, index: int) -> Iterator[Turn]:
    """Of trajectory `index`; the same for the same plan."""
    rng = np.random.default_rng((plan.seed, index))
    for turn in range(plan.turns):
        think = rng.exponential(plan.think_s) if turn and plan.think_s > 0 else 0.0
        lengths = plan.observation_tokens if turn else plan.prompt_tokens
        heard: list[int] = rng.integers(*plan.vocab, lengths.draw(1, rng)[0]).tolist()
        yield Turn(think, heard, plan.turn_tokens.draw(1, rng)[0], int(rng.integers(2**62)))


@dataclass(frozen=True)
class Trajectory:
    """A finished one: its whole token sequence and the generated part of each turn."""

    index: int
    tokens: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]


@dataclass
class RolloutRecord:
    """What happened; times in seconds since `drive` began."""

    started: float
    """The loop's (monotonic) clock when `drive` began, to align with other records."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of every chunk."""
    finished: list[Trajectory] = field(default_factory=list)
    turns: int = 0
    aborts: Counter[str] = field(default_factory=Counter)
    """Answers that ended with `abort`, by stop_reason (`none` without one)."""
    broken: Counter[str] = field(default_factory=Counter)
    """Connections that failed or refusals that pass with time, by error type or status."""
    resumed_turns: int = 0
    """Turns that needed more than one request."""
    span_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    def tokens_per_s(self, begin: float = 0.0, end: float | None = None) -> float:
        until = self.span_s if end is None else end
        inside = sum(n for at, n in self.arrivals if begin <= at < until)
        return inside / (until - begin) if until > begin else 0.0

    def timeline(self, bin_s: float = 1.0) -> list[float]:
        """Tokens per second in consecutive bins from 0 to the end; the last bin is partial."""
        bins = [0.0] * (int(self.span_s / bin_s) + 1)
        for at, count in self.arrivals:
            bins[min(int(at / bin_s), len(bins) - 1)] += count / bin_s
        return bins


@dataclass
class _Driver:
    session: aiohttp.ClientSession
    url: str
    model: str | None
    plan: RolloutPlan
    record: RolloutRecord
    on_tokens: Callable[[float, int], None] | None
    indices: Iterator[int] = field(default_factory=itertools.count)

    async def roll_all(self) -> None:
        while self.model is None:
            try:
                self.model = await ask_model(self.session, self.url)
            except LoadError:
                self.record.broken["no model yet"] += 1
                await asyncio.sleep(BACKOFF_MAX_S)
        slots = [asyncio.create_task(self.keep_rolling()) for _ in range(self.plan.in_flight)]
        try:
            await asyncio.gather(*slots)
        finally:
            for slot in slots:
                slot.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    async def keep_rolling(self) -> None:
        """One of the slots in flight: trajectory after trajectory."""
        for index in self.indices:
            if self.plan.trajectories is not None and index >= self.plan.trajectories:
                return
            self.record.finished.append(await self.roll(index))

    async def roll(self, index: int) -> Trajectory:
        context: list[int] = []
        said: list[tuple[int, ...]] = []
        for number, turn in enumerate(turns(self.plan, index)):
            if number:
                await asyncio.sleep(turn.think_s)
            context += turn.heard
            made = await self.generate(context, turn.budget, turn.seed)
            context += made
            said.append(tuple(made))
            self.record.turns += 1
        return Trajectory(index, tuple(context), tuple(said))

    async def generate(self, context: list[int], budget: int, seed: int) -> list[int]:
        """One turn, through as many requests as it takes."""
        made: list[int] = []
        backoff = BACKOFF_FIRST_S
        for attempt in itertools.count():
            before = len(made)
            # A resumed sampler must not replay the draws of the request it continues.
            body = self.body(context + made, budget - before, seed + attempt)
            finished = await self.attempt(body, made)
            if finished or len(made) >= budget:
                self.record.resumed_turns += attempt > 0
                break
            if len(made) > before:
                backoff = BACKOFF_FIRST_S
            else:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, BACKOFF_MAX_S)
        return made

    async def attempt(self, body: bytes, made: list[int]) -> bool:
        """Append what one request yields to `made`; whether the turn is over."""
        loop = asyncio.get_running_loop()
        stall = self.plan.stall_s
        reason: str | None = None
        try:
            async with asyncio.timeout(stall) as deadline:
                async for chunk in stream_completion(self.session, self.url, body):
                    deadline.reschedule(loop.time() + stall)
                    made += chunk.token_ids
                    reason = chunk.finish_reason or reason
                    if chunk.token_ids:
                        self.count(chunk.at - self.record.started, len(chunk.token_ids))
                    if chunk.finish_reason == "abort":
                        self.record.aborts[str(chunk.stop_reason or "none")] += 1
            if reason is None:
                self.record.broken["stream ended early"] += 1
        except Refused as error:
            if error.status not in RETRIED_STATUS and error.status < 500:
                raise
            self.record.broken[error.where] += 1
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            self.record.broken[type(error).__name__] += 1
        over = reason not in (None, "abort", "error")
        if over and not made:
            raise LoadError(f"{self.url} sends no token_ids: rollouts need return_token_ids (vLLM)")
        return over

    def count(self, at: float, tokens: int) -> None:
        self.record.arrivals.append((at, tokens))
        if self.on_tokens is not None:
            self.on_tokens(at, tokens)

    def body(self, prompt: list[int], max_tokens: int, seed: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": self.plan.temperature,
                "seed": seed,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
                **self.plan.extra,
            }
        )


async def drive(
    url: str,
    plan: RolloutPlan,
    stop: asyncio.Event,
    *,
    model: str | None = None,
    on_tokens: Callable[[float, int], None] | None = None,
) -> RolloutRecord:
    """Keep `plan.in_flight` trajectories going until `stop` is set or the plan is done.

    Raises Refused when the server finds a request itself wrong (most 4xx): no retry mends that;
    LoadError when it returns no token ids.
    """
    loop = asyncio.get_running_loop()
    url = url.rstrip("/").removesuffix("/v1")
    record = RolloutRecord(started=loop.time())
    async with open_session() as session:
        driver = _Driver(session, url, model, plan, record, on_tokens)
        stopping = asyncio.create_task(stop.wait())
        rolling = asyncio.create_task(driver.roll_all())
        try:
            await asyncio.wait({rolling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if rolling.done():
                rolling.result()
        finally:
            record.span_s = loop.time() - record.started
            rolling.cancel()
            stopping.cancel()
            await asyncio.gather(rolling, stopping, return_exceptions=True)
    return record
