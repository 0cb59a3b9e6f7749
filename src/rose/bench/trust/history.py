"""One history of a device: what its people do, what breaks and when, and whether promises held.

A seed makes the history. Faults come at random, alone or several at once, and end; then all is calm
for a while, everybody must have what is theirs, and lending must work again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.bench.trust.device import MOST_TURNS, Device, SimNode
from rose.bench.trust.promises import CALM_S
from rose.bench.trust.virtual import VirtualLoop
from rose.cluster.config import ConfigError
from rose.cluster.custody import TakenBack
from rose.cluster.restarts import MOST_PAUSE_S
from rose.executor.page import PageError

LASTS_S = 14.0
FAULTS = (2, 6)
LOOK_S = 0.1
EXPECTED = (ConfigError, TakenBack, TimeoutError, PageError, OSError)
"""What a person is told when an order fails."""

Fault = Callable[["History"], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Outcome:
    seed: int
    broken: dict[str, str]
    unseen_launches: int
    revoke_s: float
    memory_back_s: float
    faults: tuple[str, ...]


class History:
    def __init__(self, device: Device) -> None:
        self.device, self.rng = device, device.rng
        self.tasks: list[asyncio.Task[Any]] = []
        self.calm = False
        self.quiet = False
        """The owner leaves the device alone."""

    async def live(self) -> tuple[str, ...]:
        device = self.device
        if device.attached:
            device.start_engine("serving")
        await device.start_node()
        self.begin(self._watch(), self._users(), self._turns(), self._init())
        await asyncio.sleep(4.0)  # both engines are up, and lent
        owner = self.begin(self._owner())
        names = self.rng.choices(list(FAULT), k=self.rng.randint(*FAULTS))
        faults = []
        for name in names:
            await asyncio.sleep(self.rng.expovariate(len(names) / LASTS_S))
            faults.append(self.begin(FAULT[name](self)))
        await asyncio.gather(*faults)
        await asyncio.sleep(self.rng.uniform(0.0, 3.0))
        owner.cancel()
        await self._calm()
        return tuple(names)

    def begin(self, *works: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks += [asyncio.get_running_loop().create_task(work) for work in works]
        return self.tasks[-1]

    async def end(self) -> None:
        for process in self.device.table.living:
            process.held = False
            process.kill()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _init(self) -> None:
        """As systemd: a node that could not start is started again."""
        while True:
            await asyncio.sleep(1.0)
            node = self.device.node
            if node is not None and node.process.alive and node.failure is not None:
                node.process.kill()
                if self.calm and "already has a serving engine" in str(node.failure):
                    await _kill(self, "serving")  # as the node's sentence says
                await self.device.start_node()
            if self.calm and self.device.attached:
                for process in [p for p in self.device.table.living if p.name == "serving"][1:]:
                    process.kill()

    # ---- people

    async def _watch(self) -> None:
        while True:
            self.device.promises.look()
            await asyncio.sleep(LOOK_S)

    async def _users(self) -> None:
        rng = self.rng
        while True:
            burst = rng.random() < 0.2
            await asyncio.sleep(rng.expovariate(2.0))
            for _ in range(rng.randint(4, 10) if burst else 1):
                if ready := self.device.servings:
                    ready[-1].arrive(rng.randint(1, 6), rng.uniform(0.05, 0.6))

    async def _turns(self) -> None:
        while True:
            rollout = self.device.rollout
            if rollout is not None and len(rollout.turns) < MOST_TURNS:
                rollout.take(self.rng.randint(1, 6))
            await asyncio.sleep(0.15)

    async def _owner(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(0.4))
            if not self.quiet:
                await (self.take_back() if self.rng.random() < 0.5 else self.lend())

    async def take_back(self) -> bool:
        """As the owner's client: False when it was not told that it is done."""
        device, began = self.device, self.device.clock()
        node = self._reached()
        if node is None:
            return False
        device.asked_back, lends = True, device.lends
        error = await self._call(node.process.spawn(node.take_back()))
        if device.lends != lends:
            return False  # somebody else has lent it meanwhile
        if error is None:
            device.taken_back = True
            device.promises.revoked(device.clock() - began)
        elif not isinstance(error, asyncio.CancelledError) and not device.was_held:
            device.promises.break_("a revocation is never refused", repr(error))
        return error is None

    async def lend(self) -> bool:
        node = self._reached()
        if node is None:
            return False
        self.device.taken_back = self.device.asked_back = False
        self.device.lends += 1
        self.device.lent_at = self.device.clock()
        error = await self._call(node.process.spawn(node.lend()))
        if error is None:
            self.device.lent_at = self.device.clock()
        return error is None

    def _reached(self) -> SimNode | None:
        """The node, if its API is up."""
        node = self.device.node
        return node if node is not None and node.process.alive and node.up else None

    async def _call(self, call: asyncio.Task[float]) -> BaseException | None:
        """What went wrong with it; CancelledError when the node died meanwhile."""
        await asyncio.wait({call})
        return asyncio.CancelledError() if call.cancelled() else call.exception()

    # ---- the end

    async def _calm(self) -> None:
        """Nothing breaks any more: everybody gets what is theirs, and lending works again."""
        device, promises = self.device, self.device.promises
        device.answers, device.warm_up_fails, device.serving_boots_as = "sense", False, "rose"
        device.disk.full.clear()
        for process in device.table.living:
            process.no_descriptors = False
            process.cont()
            process.hold(False)
        device.wants = False
        self.begin(self._repair())
        await asyncio.sleep(CALM_S)
        if device.node is None or not device.node.ready:
            await asyncio.sleep(MOST_PAUSE_S)  # before the next try
        was_taken_back = device.taken_back
        node = device.node
        if node is None or not node.ready:
            promises.break_(
                "all is well after a calm",
                f"the node is not ready: {node and node.failure!r}",
            )
            return
        if was_taken_back and node.offered:
            promises.break_("what is taken back stays so", "the node offers the device")
        device.wants = True
        if not device.asked_back and not node.offered:
            promises.break_("what is lent stays so", "the node does not offer the device")
        await self._lends()
        await self._is_given_back()

    async def _repair(self) -> None:
        """Somebody starts what is down and is nobody else's to start."""
        device = self.device
        if not device.node_lives:
            await device.start_node()
        self.calm = True
        for serving in list(device.servings):
            if serving.kind == "stock":
                serving.process.kill()
        if device.attached and not any(p.name == "serving" for p in device.table.living):
            device.start_engine("serving")

    async def _lends(self) -> None:
        promises = self.device.promises
        for _ in range(3):
            if await self.lend():
                break
            await asyncio.sleep(1.0)
        before = promises_steps(self.device)
        await asyncio.sleep(4.0)
        if promises_steps(self.device) == before:
            why = self.device.rollout.gate.used if self.device.rollout else "no engine"
            promises.break_("lending works again after a calm", f"no rollout step: {why}")

    async def _is_given_back(self) -> None:
        device, promises = self.device, self.device.promises
        if not await self.take_back():
            promises.break_("a revocation works when all is calm", "it failed")
        await asyncio.sleep(0.5)
        for serving in device.servings:
            if serving.parking is not None and serving.parking.usable < serving.total_blocks:
                promises.break_(
                    "serving has all of a device that was taken back",
                    f"{serving.parking.usable} of {serving.total_blocks} blocks",
                )


def promises_steps(device: Device) -> int:
    return device.rollout.steps if device.rollout is not None else 0


# ---- what breaks


async def _kill(history: History, name: str) -> None:
    for process in history.device.table.living:
        if process.name == name:
            process.kill()


async def kill_rollout(history: History) -> None:
    await _kill(history, "rollout")


async def stop_rollout(history: History) -> None:
    rollout = history.device.rollout
    if rollout is not None:
        rollout.process.stop()
        await asyncio.sleep(history.rng.choice([0.5, 2.0, 8.0]))
        rollout.process.cont()


async def hold_rollout(history: History) -> None:
    rollout = history.device.rollout
    if rollout is not None:
        history.device.was_held = True
        rollout.process.hold(True)
        await asyncio.sleep(history.rng.choice([0.5, 3.0]))
        rollout.process.hold(False)


async def kill_node(history: History) -> None:
    await _kill(history, "node")
    await asyncio.sleep(history.rng.choice([0.2, 3.0, 8.0]))
    if not history.device.node_lives:
        await history.device.start_node()


async def restart_node(history: History) -> None:
    device = history.device
    if device.node is None or not device.node.ready:
        return
    with suppress(*EXPECTED):
        await device.stop_node()
    await asyncio.sleep(0.5)
    if not device.node_lives:
        await device.start_node()


async def kill_node_and_stop_rollout(history: History) -> None:
    rollout = history.device.rollout
    if rollout is not None:
        rollout.process.stop()
    await kill_node(history)


async def kill_node_while_it_takes_back(history: History) -> None:
    call = history.begin(history.take_back())
    await asyncio.sleep(history.rng.choice([0.0, 0.001, 0.01, 0.1]))
    await kill_node(history)
    await asyncio.wait({call})


async def reboot(history: History) -> None:
    """Everything is gone that is not on a disk."""
    device = history.device
    for process in device.table.living:
        process.held = False
        process.kill()
    device.disk.files = {n: c for n, c in device.disk.files.items() if n.startswith("disk/")}
    device.path.write_bytes(b"")
    if device.attached:
        device.start_engine("serving")
    await device.start_node()


async def reboot_while_the_disk_is_full(history: History) -> None:
    disk = history.device.disk
    disk.full.add("disk")
    await history.take_back()
    await reboot(history)
    await asyncio.sleep(2.0)
    disk.full.clear()


async def kill_serving(history: History) -> None:
    device = history.device
    await _kill(history, "serving")
    if device.attached:
        await asyncio.sleep(history.rng.choice([0.1, 2.0]))
        device.start_engine("serving")


async def serving_as_stock(history: History) -> None:
    """Rolled back without rose's options, or up after a page error; later with them again."""
    device = history.device
    device.serving_boots_as = "stock"
    await kill_serving(history)
    await asyncio.sleep(6.0)
    device.serving_boots_as = "rose"
    await kill_serving(history)


async def rolling_restart(history: History) -> None:
    """The next serving engine starts beside the one that serves."""
    device = history.device
    if not device.attached or not device.servings:
        return
    old = device.servings[0]
    device.start_engine("serving")
    await asyncio.sleep(history.rng.choice([2.5, 6.0]))
    old.process.kill()


async def second_rollout(history: History) -> None:
    history.device.start_engine("rollout")


async def page_damaged(history: History) -> None:
    for _ in range(history.rng.randint(1, 4)):
        history.device.damage(history.rng.choice(["cut", "scribble", "scribble"]))
        await asyncio.sleep(history.rng.choice([0.0, 0.05, 0.4]))


async def disk_full(history: History) -> None:
    disk = history.device.disk
    disk.full |= set(history.rng.choice([("shm",), ("disk",), ("shm", "disk")]))
    history.begin(history.take_back())
    await asyncio.sleep(4.0)
    disk.full.clear()


async def no_descriptors(history: History) -> None:
    device = history.device
    processes = device.table.living
    chosen = history.rng.sample(
        processes, history.rng.randint(min(1, len(processes)), len(processes))
    )
    for process in chosen:
        process.no_descriptors = True
    others: list[Fault] = [kill_serving, kill_rollout, kill_rollout, restart_node]
    await history.rng.choice(others)(history)
    await asyncio.sleep(4.0)
    for process in chosen:
        process.no_descriptors = False


async def second_thread_fails(history: History) -> None:
    for serving in history.device.servings:
        serving.fails = history.rng.choice([1, 3, 30])


async def overload(history: History) -> None:
    for serving in history.device.servings:
        serving.overloaded = True
        for _ in range(12):
            serving.arrive(4, 3.0)
    await asyncio.sleep(3.0)
    for serving in history.device.servings:
        serving.overloaded = False


async def warm_up_fails(history: History) -> None:
    device = history.device
    device.warm_up_fails = True
    await history.take_back()
    await kill_rollout(history)
    await asyncio.sleep(6.0)
    device.warm_up_fails = False


async def restart_of_what_is_taken_back(history: History) -> None:
    await history.take_back()
    await kill_rollout(history)


async def scheduler_talks_nonsense(history: History) -> None:
    device = history.device
    if device.answers != "sense":
        return
    device.answers = history.rng.choice(["nonsense", "nothing"])
    history.quiet = True
    await history.lend()
    since = device.clock()
    await asyncio.sleep(9.0)
    history.quiet = False
    node = device.node
    if node is not None and node.ready and node.process.alive:
        lent_since = max(device.lent_at, node.started_at) > since
        if not lent_since and node.status()["state"] == "active":
            device.promises.break_("a lease ends with its scheduler", "it is active")
    device.answers = "sense"


async def scheduler_changes_its_mind(history: History) -> None:
    history.device.wants = not history.device.wants
    await asyncio.sleep(history.rng.uniform(1.0, 5.0))
    history.device.wants = True


FAULT: dict[str, Fault] = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        kill_rollout,
        stop_rollout,
        hold_rollout,
        kill_node,
        restart_node,
        kill_node_and_stop_rollout,
        kill_node_while_it_takes_back,
        reboot,
        reboot_while_the_disk_is_full,
        kill_serving,
        serving_as_stock,
        rolling_restart,
        second_rollout,
        page_damaged,
        disk_full,
        no_descriptors,
        second_thread_fails,
        overload,
        warm_up_fails,
        restart_of_what_is_taken_back,
        scheduler_talks_nonsense,
        scheduler_changes_its_mind,
    )
}


@contextmanager
def _unheard(*names: str) -> Iterator[None]:
    """Nobody reads what simulated processes log."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def run(seed: int) -> Outcome:
    """The same seed is the same history."""
    loop = VirtualLoop()
    loop.set_exception_handler(lambda *_: None)
    with (
        _unheard("rose.node", "vllm.rose"),
        tempfile.TemporaryDirectory(prefix="rose-trust-") as folder,
    ):
        device = Device(loop, random.Random(seed), Path(folder))
        history = History(device)
        faults: tuple[str, ...] = ()
        try:
            faults = loop.run_until_complete(history.live())
        except Exception as error:
            device.promises.break_("the history goes on", repr(error))
        finally:
            loop.run_until_complete(history.end())
            loop.close()
    promises = device.promises
    return Outcome(
        seed,
        dict(promises.broken),
        promises.unseen_launches,
        promises.revoke_s_worst,
        promises.memory_back_s_worst,
        faults,
    )
