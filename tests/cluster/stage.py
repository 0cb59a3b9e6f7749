"""A node on a stage: its engines are played by tasks that speak on a real page.

The parts that decide are real (the node, the page, the rollout engine's `Borrower`, serving's
`Lender`); processes, model servers and HTTP are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.executor.neighbours import Blocks, Table

from rose.cluster.config import NodeConfig
from rose.cluster.node import Node
from rose.executor import memory
from rose.executor.borrower import Borrower
from rose.executor.facts import RolloutFacts, ServingFacts
from rose.executor.latency import Profile
from rose.executor.lender import Lender
from rose.executor.page import Page
from rose.executor.processes import Writer

TICK_S = 0.002
PIDS = itertools.count(4_200_000)
"""Above the kernel's largest: nobody is hit by mistake."""


class Host(Table):
    def kill(self, writer: Writer) -> None:
        super().kill(writer)
        self.dead.add(writer)


@dataclass
class Actor:
    """An engine: what the node holds of it, and the task that plays it."""

    role: str
    config: NodeConfig
    host: Host
    url: str = "http://127.0.0.1:1"
    log: Path = Path("/dev/null")
    started: int = 1
    pid: int = field(default_factory=lambda: next(PIDS))
    deaf: bool = False
    """It does not look at the page any more, like a process that is stopped."""
    turns: int = 0
    unkillable: bool = False
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.writer = Writer(self.pid, self.started)

    def play(self) -> Actor:
        play = self._rollout if self.role == "rollout" else self._serving
        self.task = asyncio.create_task(play())
        return self

    async def open(self) -> Page:
        config = self.config
        page = Page.create(
            config.page_path,
            kv_total=config.kv_total,
            device=config.device,
            me=self.writer,
            processes=self.host,
        )
        await until(lambda: page.own(self.role))
        self.opened.set()
        return page

    async def _rollout(self) -> None:
        page = self.page = await self.open()
        blocks = self.blocks = Blocks(self.config.kv_total, block_bytes=1)
        borrower: Borrower
        terms = memory.MemoryTerms(page.kv_total, 0.2, "aimd", page.kv_total)

        def publish() -> None:
            page.publish("rollout", facts())

        def facts() -> RolloutFacts:
            border = borrower.border
            return RolloutFacts(
                state=borrower.state,
                epoch=borrower.epoch,
                running=self.turns,
                kv_claim=border.claim,
                kv_revision=border.revision,
                kv_resident=blocks.usable,
                kv_max=page.kv_total,
            )

        borrower = Borrower(page, blocks, publish, terms, dedicated=False)
        while self.alive:
            if not self.deaf:
                borrower.follow_orders(empty=not self.turns)
                borrower.follow_memory(page.kv_total, lambda _: None)
                borrower.follow_orders(empty=not self.turns)
                publish()
                page.ring("node")
            await asyncio.sleep(TICK_S)
        page.close()

    async def _serving(self) -> None:
        page = self.page = await self.open()
        blocks = Blocks(page.kv_total, usable=page.kv_total)
        lender = Lender(page, blocks, 0.2, threading.Lock(), slice_bytes=1 << 40, owns=True)
        while self.alive:
            if not self.deaf:
                lender.respect()
                page.publish(
                    "serving",
                    ServingFacts(
                        written=time.monotonic(),
                        ttft_s=0.5,
                        tpot_s=0.1,
                        kv_quota=blocks.usable,
                        kv_acked=lender.revision,
                        kv_max=page.kv_total,
                    ),
                )
            await asyncio.sleep(TICK_S)
        page.close()

    @property
    def alive(self) -> bool:
        return self.host.alive(self.writer)

    async def stop(self, also: int | None = None, gently: bool = True) -> bool:
        if self.unkillable:
            return False
        self.host.dead.add(self.writer)
        return True

    async def ready(self, session: object) -> None:
        await self.opened.wait()

    async def healthy(self, session: object) -> bool:
        return self.alive

    def keep_to(self, cores: tuple[int, ...]) -> None: ...

    def yield_host(self) -> None: ...


class Stage:
    """Starts nodes of one device, one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = Host()
        self.engines: list[Actor] = []
        self.first_steps: Callable[[], Any] = _nothing
        self.config = NodeConfig.model_validate({
            "kv_gb": 1e-6,
            "page": str(folder / "page"),
            "log_dir": str(folder / "logs"),
            "serving": {"model": "tiny-a", "ttft_ms": 500, "tpot_ms": 100},
            "rollout": {"model": "tiny-b", "preemption": "none"},
        })  # fmt: skip
        profile = Profile("m", "cpu:0", 0.001, 1e-5, 1e-5, 0.0, margin=1.5, error=0.0)
        saved = SimpleNamespace(path=folder / "profile.json", profile=profile)

        async def ensure(_: NodeConfig) -> dict[str, Any]:
            return {"serving": saved, "rollout": saved}

        def start(config: NodeConfig, role: str, port: int, options: Mapping[str, Any]) -> Actor:
            self.engines.append(Actor(role, config, self.host).play())
            return self.engines[-1]

        async def first_steps(_: Node) -> None:
            await self.first_steps()

        monkeypatch.setattr("rose.cluster.node.profiles.ensure", ensure)
        monkeypatch.setattr("rose.cluster.node.check_fits", lambda _: None)
        monkeypatch.setattr("rose.cluster.node.Engine.start", start)
        monkeypatch.setattr("rose.cluster.restarts.FIRST_PAUSE_S", 0.0)
        monkeypatch.setattr("rose.cluster.node.SUPERVISE_S", 0.02)
        monkeypatch.setattr("rose.executor.page.Kernel", lambda: self.host)
        monkeypatch.setattr(Node, "_first_steps", first_steps)

    @contextlib.asynccontextmanager
    async def node(self) -> AsyncIterator[Node]:
        node = Node(self.config)
        await node.start()
        try:
            yield node
        finally:
            await node.stop()
            node.page.close()
            await self.curtain()

    async def killed(self, node: Node) -> None:
        """The node is gone in the middle of whatever it did, and its engines with it."""
        for task in node._tasks:
            task.cancel()
        await asyncio.gather(*node._tasks, return_exceptions=True)
        node.page.close()  # the kernel gives up a dead process's locks
        await self.curtain()
        await node._stack.aclose()

    async def curtain(self) -> None:
        for engine in self.engines:
            engine.host.dead.add(engine.writer)
        await asyncio.gather(*(e.task for e in self.engines if e.task), return_exceptions=True)
        self.engines.clear()

    def engine(self, role: str) -> Actor:
        return [engine for engine in self.engines if engine.role == role][-1]


async def _nothing() -> None: ...


async def until(true: Callable[[], Any], most_s: float = 20.0) -> None:
    deadline = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < deadline, "never happened"
        await asyncio.sleep(TICK_S)
