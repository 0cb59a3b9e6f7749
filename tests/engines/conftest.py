"""Load on the real node from background threads, and a judge of what the engines answer."""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.scheduler.conftest import Process

from rose import models
from rose.bench import rollouts
from rose.bench.arrivals import Fixed
from rose.bench.load import Refused, open_session, stream_completion
from rose.net import free_ports

NEAR_TIE = 1e-4
"""Logits this close are a tie between two correct float32 implementations."""
PATIENCE_S = 180.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engines/" in item.nodeid:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.node)


@cache
def _reference(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(models.resolve(model), dtype=torch.float32).eval()


class Judge:
    """Says whether tokens are what greedy decoding gives, by one pass of the plain model."""

    def wrong(self, model: str, tokens: list[int], generated: list[int]) -> list[int]:
        """Positions, of those generated, at which another token has the highest logit."""
        import torch

        with torch.inference_mode():
            logits = _reference(model)(torch.tensor([tokens])).logits[0]
        best = logits.max(-1).values
        return [i for i in generated if best[i - 1] - logits[i - 1, tokens[i]] > NEAR_TIE]

    def accept(self, model: str, prompt: list[int], made: list[int]) -> None:
        span = list(range(len(prompt), len(prompt) + len(made)))
        assert made, f"{model} answered nothing"
        assert not self.wrong(model, prompt + made, span)


@pytest.fixture(scope="session")
def judge(rose_home: object) -> Judge:
    return Judge()


@dataclass
class Answer:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], output: int
) -> Answer:
    """One greedy streamed request; whatever goes wrong is in the answer."""
    answer = Answer(prompt)
    body = msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in stream_completion(session, url, body):
                answer.tokens += chunk.token_ids
                answer.finish_reason = chunk.finish_reason or answer.finish_reason
                answer.stop_reason = chunk.stop_reason or answer.stop_reason
    except (aiohttp.ClientError, OSError, Refused) as error:
        answer.error = repr(error)
    return answer


def ask_all(url: str, model: str, asked: list[list[int]], output: int) -> list[Answer]:
    """All at once; returns when every one is answered."""

    async def go() -> list[Answer]:
        async with open_session() as session:
            return await asyncio.gather(*(ask(session, url, model, p, output) for p in asked))

    return asyncio.run(go())


@pytest.fixture
def complete() -> Callable[..., list[Answer]]:
    return ask_all


@pytest.fixture
def random_prompts() -> Callable[[int, int, int], list[list[int]]]:
    def make(seed: int, count: int, tokens: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(5, 255) for _ in range(tokens)] for _ in range(count)]

    return make


@dataclass
class ServingLoad:
    """Serving users that come and go: a few at a time, with pauses."""

    url: str
    judge: Judge
    seed: int = 0
    users: int = 2
    answers: list[Answer] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        async with open_session() as session:
            await asyncio.gather(*(self._use(session, user) for user in range(self.users)))

    async def _use(self, session: aiohttp.ClientSession, user: int) -> None:
        rng = random.Random(self.seed * 1000 + user)
        while not self._stop.is_set():
            prompt = [rng.randrange(5, 255) for _ in range(rng.choice((12, 40, 130)))]
            self.answers.append(await ask(session, self.url, "tiny-a", prompt, 24))
            await asyncio.sleep(rng.choice((0.0, 0.05, 0.4)))

    def check(self) -> None:
        """Every request was answered fully and with the right tokens."""
        assert self.answers, "no serving request was sent"
        troubled = [a for a in self.answers if a.error or a.finish_reason != "length"]
        assert not troubled, f"{len(troubled)} of {len(self.answers)}: {troubled[0]}"
        for answer in self.answers:
            assert len(answer.tokens) == 24
            self.judge.accept("tiny-a", answer.prompt, answer.tokens)


@pytest.fixture
def serving_load(judge: Judge) -> Callable[..., AbstractContextManager[ServingLoad]]:
    """A context in which serving is used; leaving it checks every answer."""

    @contextmanager
    def using(url: str, seed: int = 0) -> Iterator[ServingLoad]:
        load = ServingLoad(url, judge, seed)
        thread = threading.Thread(target=load.run)
        thread.start()
        try:
            yield load
        finally:
            load._stop.set()
            thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a serving request hangs"
        load.check()

    return using


@dataclass
class Rollouts:
    """Multi-turn greedy trajectories in the background, resumed whenever they are cut short."""

    url: str
    plan: rollouts.RolloutPlan
    judge: Judge
    record: rollouts.RolloutRecord | None = None
    tokens: int = 0
    _stop: Callable[[], object] | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    async def _run(self) -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        self.record = await rollouts.drive(self.url, self.plan, stop, on_tokens=self._count)

    def _count(self, _: float, tokens: int) -> None:
        self.tokens += tokens

    @property
    def done(self) -> bool:
        assert self._thread is not None
        return not self._thread.is_alive()

    def finish(self, timeout: float = PATIENCE_S) -> rollouts.RolloutRecord:
        """Wait for the last trajectory and check every token of all of them."""
        assert self._thread is not None
        self._thread.join(timeout)
        assert self.done, f"rollouts hang after {self.tokens} tokens"
        assert self.record is not None
        assert len(self.record.finished) == self.plan.trajectories
        for trajectory in self.record.finished:
            self._check(trajectory)
        return self.record

    def abandon(self) -> None:
        if self._stop is not None and not self.done:
            self._stop()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)

    def _check(self, trajectory: rollouts.Trajectory) -> None:
        assert isinstance(self.plan.prompt_tokens, Fixed)
        assert isinstance(self.plan.observation_tokens, Fixed)
        generated: list[int] = []
        at = self.plan.prompt_tokens.tokens
        for turn in trajectory.turns:
            generated += range(at, at + len(turn))
            at += len(turn) + self.plan.observation_tokens.tokens
        assert not self.judge.wrong("tiny-b", list(trajectory.tokens), generated)


@pytest.fixture
def start_rollouts(judge: Judge) -> Iterator[Callable[..., Rollouts]]:
    """Start trajectories in the background; what the test does not finish is abandoned."""
    started: list[Rollouts] = []

    def start(url: str, **plan: Any) -> Rollouts:
        running = Rollouts(url, rollouts.RolloutPlan(temperature=0.0, **plan), judge)
        running.start()
        started.append(running)
        return running

    yield start
    for one in started:
        one.abandon()


def start_door(node: Any, folder: Path, *options: str) -> Process:
    (port,) = free_ports(1)
    words = ["--engine", node.rollout_url, "--listen", f"127.0.0.1:{port}"]
    words += ["--ledger", str(folder / "ledger.sqlite"), *options]
    made = Process(port, folder / "scheduler.log", "-m", "rose.cli", "scheduler", *words)
    made.await_health()
    return made


@pytest.fixture
def door(active_node: Any, tmp_path: Path) -> Iterator[Process]:
    made = start_door(active_node, tmp_path)
    yield made
    made.end()
