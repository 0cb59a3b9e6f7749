"""A simulated device: a page, processes, disks, and everybody who wants something of it.

The node is the real one, with engines that are made up; its owner takes the device back and lends
it, a scheduler borrows it, users come to the serving engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rose.bench.trust.disk import Disk
from rose.bench.trust.engines import BLOCK, TOTAL, SimRollout, SimServing
from rose.bench.trust.promises import Promises
from rose.bench.trust.virtual import Process, SimKernel, Table, VirtualLoop
from rose.cluster import reporting
from rose.cluster.config import ConfigError, NodeConfig, parse
from rose.cluster.engine import KILL_S, Engine
from rose.cluster.memo import Memo
from rose.cluster.node import Node
from rose.executor.facts import NodeOrders
from rose.executor.page import Page, PageError
from rose.executor.priority import Preemption

LEASE_S = 4.0
BOOT_S = {"serving": 1.5, "rollout": 2.0}
NODE_BOOT_S = 0.5
MOST_TURNS = 24


class SimPage(Page):
    """Rings wake tasks instead of threads."""

    bells: dict[str, list[asyncio.Event]]

    def ring(self, name: str) -> None:
        super().ring(name)
        for event in self.bells[name]:
            event.set()

    def listen(self, name: str, event: asyncio.Event) -> None:
        self.bells[name].append(event)


class Device:
    def __init__(self, loop: VirtualLoop, rng: random.Random, folder: Path) -> None:
        self._loop, self.rng = loop, rng
        self.began = self.facts_at = loop.time()
        self.path = folder / "page"
        self.table, self.disk = Table(), Disk()
        self.bells: dict[str, list[asyncio.Event]] = {
            name: [] for name in ("serving", "gate", "watch", "node")
        }
        self.rollout: SimRollout | None = None
        self.servings: list[SimServing] = []
        self.promises = Promises(self)
        self.attached = rng.random() < 0.5
        """The serving engine is its owner's, not the node's."""
        self.preempts = rng.random() < 0.5
        self.node: SimNode | None = None
        self.taken_back = False
        """The owner was told so, and has not lent the device since."""
        self.asked_back = False
        """The owner has asked for it, answered or not."""
        self.lends = 0
        self.lent_at = -1.0
        """By the owner: how often, and when last."""
        self.was_held = False
        """The kernel held the rollout engine: killing it may have taken its time."""
        self.warm_up_fails = False
        self.serving_boots_as = "rose"
        self.answers = "sense"
        """Of the scheduler: sense, nonsense, or nothing."""
        self.wants = True
        """The scheduler, to borrow."""
        Page.create(self.path, kv_total=TOTAL, device="sim").close()

    @property
    def node_lives(self) -> bool:
        return self.node is not None and self.node.process.alive

    def clock(self) -> float:
        return self._loop.now

    def orders(self) -> NodeOrders | None:
        """As they stand on the page, if it can be read."""
        try:
            page = Page.open(self.path)
        except PageError:
            return None
        reading = page.node()
        page.close()
        return reading.facts if reading is not None else None

    def open_page(self, process: Process) -> SimPage:
        page = SimPage.create(
            self.path,
            kv_total=TOTAL,
            device="sim",
            me=process.writer,
            processes=SimKernel(process),
        )
        assert isinstance(page, SimPage)
        page.bells = self.bells
        process.at_end.append(page.close)
        return page

    def damage(self, how: str) -> None:
        """Somebody writes into the page, or cuts it off."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            if how == "cut":
                file.truncate(0)
            else:
                file.seek(self.rng.randrange(0, 2560 - 200))
                file.write(self.rng.randbytes(200))

    # ---- processes

    def start_engine(self, role: str) -> SimEngine:
        process = self.table.start(role)
        engine = SimEngine(role, process)
        process.spawn(self._boot(engine, role, process))
        return engine

    async def _boot(self, engine: SimEngine, role: str, process: Process) -> None:
        await process.sleep(BOOT_S[role] * self.rng.uniform(0.5, 1.5))
        if role == "serving":
            self._serve(process)
        elif self.table and self._rollout(process) is None:
            process.kill()
            return
        engine.up = True

    def _serve(self, process: Process) -> None:
        try:
            serving = SimServing(self, process, self.serving_boots_as)
        except (PageError, OSError):
            serving = SimServing(self, process, "stock")  # as the live one, which says so
        process.at_end.append(lambda: self.servings.remove(serving))

    def _rollout(self, process: Process) -> SimRollout | None:
        before = self.rollout
        try:
            made = SimRollout(self, process)
        except (RuntimeError, PageError):
            self.rollout = before
            return None

        def end() -> None:
            made.parking.usable = made.parking.used = 0
            if self.rollout is made:
                self.rollout = None

        process.at_end.append(end)
        return made

    async def start_node(self) -> None:
        process = self.table.start("node")
        node = self.node = SimNode(self, process)
        node.life = process.spawn(node.live())

    async def stop_node(self) -> None:
        """A clean stop, as by SIGTERM."""
        node, self.node = self.node, None
        if node is not None and node.process.alive:
            await node.stop()
            node.process.kill()


class SimEngine(Engine):
    """As much of an engine as a node sees."""

    def __init__(self, role: str, process: Process, pid: int | None = None) -> None:
        self.role, self.process = role, process
        self.url, self.log = "http://127.0.0.1:1", None
        self.pid = process.writer.pid if pid is None else pid
        self.started = self.pid or None
        self.up = False

    @property
    def alive(self) -> bool:
        return self.process.alive

    async def ready(self, session: Any) -> None:
        while not self.up:
            if not self.alive:
                raise ConfigError(f"the {self.role} engine ended at start")
            await asyncio.sleep(0.1)

    async def stop(self, also: int | None = None, gently: bool = True) -> bool:
        members = [self.process]
        if also is not None and (other := self.process.table.get(also)) is not None:
            members.append(other)
        for member in members:
            member.kill()
        if any(member.alive for member in members):
            await asyncio.sleep(KILL_S)
        return not any(member.alive for member in members)


def config(page: Path, attached: bool) -> NodeConfig:
    serving = {"model": "tiny-a", "ttft_ms": 1000, "tpot_ms": 200}
    wanted = {
        "device": "cpu:0",
        "page": page,
        "kv_gb": TOTAL / (1 << 30),
        "serving": serving | ({"attach": "http://127.0.0.1:1"} if attached else {}),
        "rollout": {"model": "tiny-b"},
        "scheduler": "http://127.0.0.1:2",
        "lease_s": LEASE_S,
    }
    return parse(wanted, "simulation")


class SimNode(Node):
    """The node, with its borders made up."""

    def __init__(self, device: Device, process: Process) -> None:
        super().__init__(config(device.path, device.attached), clock=device.clock)
        self.device, self.process = device, process
        memo: Any = device.disk.path("shm/page.json")
        taken_back: Any = device.disk.path("disk/taken-back")
        self._memo = Memo(memo, taken_back, again=self._engine_again)
        if device.preempts:
            self.preemption = Preemption(True, 0.0, 0.002)
        self._rung = asyncio.Event()
        self.started_at = device.clock()
        self.up = False
        """Its API answers."""
        self.life: asyncio.Task[None] | None = None
        process.at_end.append(self._end)

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def live(self) -> None:
        """As `api.running`."""
        await self.start()
        self.up = True
        self._tasks.append(asyncio.create_task(reporting.report(self, "scheduler", "")))

    @property
    def failure(self) -> BaseException | None:
        """Why it did not start."""
        ended = self.life is not None and self.life.done() and not self.life.cancelled()
        return self.life.exception() if ended and self.life is not None else None

    # ---- borders

    async def _prepare(self, found: dict[str, Engine]) -> dict[str, int]:
        await asyncio.sleep(NODE_BOOT_S)
        return {"serving": 1, "rollout": 2}

    def _session(self) -> Any:
        return nullcontext(Scheduler(self.device))

    def _open_page(self) -> Page:
        page = self.device.open_page(self.process)
        page.listen("node", self._rung)
        return page

    def _engine_again(self, role: str, known: Any) -> Engine:
        process = self.device.table.get(known["pid"])
        assert process is not None
        engine = SimEngine(role, process)
        engine.up = True
        return engine

    def _serving(self, found: dict[str, Engine], port: int) -> Engine | None:
        if not self.device.attached:
            return super()._serving(found, port)
        engine = SimEngine("serving", self.process, pid=0)
        engine.up = True
        return engine

    async def _check_attached(self) -> None:
        """The simulated owner may start serving later."""

    def _start(self, role: str, port: int) -> Engine:
        return self.device.start_engine(role)

    def _keep_off_device(self) -> None: ...

    async def _wait(self, seen: int) -> None:
        await self.process.wait(self._rung, 0.05)

    async def _first_steps(self) -> None:
        if self.device.warm_up_fails:
            raise ConfigError("the rollout engine fails to generate")
        rollout = self.device.rollout
        if rollout is not None:
            rollout.take(1)
            await asyncio.sleep(0.2)


class Scheduler:
    """What a scheduler answers, as an HTTP client sees it."""

    status = 200

    def __init__(self, device: Device) -> None:
        self._device = device
        self._active = False

    def post(self, _: str, *, json: dict[str, Any], **__: Any) -> Scheduler:
        self._active = json["active"]
        return self

    async def __aenter__(self) -> Scheduler:
        await asyncio.sleep(0.01)
        if self._device.answers == "nothing":
            raise TimeoutError
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def text(self) -> str:
        return ""

    async def json(self) -> Any:
        device = self._device
        if device.answers == "nonsense":
            return device.rng.choice(
                [{"order": "fly"}, {}, None, [], {"order": 7}, {"order": {"x": 1}}, "activate"]
            )
        if device.wants == self._active:
            return {"order": None}
        return {"order": "activate" if device.wants else "drain"}


logging.getLogger("rose.node").addHandler(logging.NullHandler())
__all__ = ["BLOCK", "Device", "SimNode"]
