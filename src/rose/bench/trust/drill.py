"""The fault drill: real vLLM engines, a real node, and everything done to them that breaks.

Every case lends the device, lets rollouts run on it, breaks something, and takes the device back,
or waits for it to come back by itself. What is measured is how long that took, whether a rollout
step began afterwards, and how long memory was held beside a serving engine that could not be seen.
The models are tiny, so that the numbers are rose's own and not of steps that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rose.bench.trust.rig import (
    DrillError,
    Rig,
    kill_tree,
    without_descriptors,
    without_writing,
)
from rose.executor.facts import FACTS_S
from rose.executor.page import SECTION, SECTION_SIZE

HOUR_S = 3_600
CALM_REVOKES = 12
QUIET_S = 0.3
"""After a revocation was answered, in which no rollout step may begin."""
UNSEEN_S = 4.0
"""For so long serving is not seen, where that is up to us."""

Say = Callable[[str], None]


@dataclass
class Report:
    """What the drill has seen."""

    revoke_s: dict[str, list[float]] = field(default_factory=dict)
    """By fault, from the request until the device was free."""
    beyond_step_ms: list[float] = field(default_factory=list)
    """Where all was well, beyond the step in flight."""
    grants_unseen: dict[str, int] = field(default_factory=dict)
    memory_back_s: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class Drill:
    def __init__(self, rig: Rig, report: Report, say: Say) -> None:
        self.rig, self.report, self.say = rig, report, say

    async def take_back(self, fault: str) -> None:
        """POST /revoke, and hold it to its word."""
        rig, began = self.rig, time.monotonic()
        code, said = await rig.post("/revoke")
        took = time.monotonic() - began
        if code != 200:
            self.report.broken.append(f"{fault}: /revoke answered {code}: {said.get('error')}")
        await self._judge(fault, took)

    async def _judge(self, fault: str, took: float) -> None:
        rig, report = self.rig, self.report
        report.revoke_s.setdefault(fault, []).append(took)
        if not rig.is_free():
            report.broken.append(f"{fault}: the device was not free when /revoke had answered")
        before = rig.rollout()
        await asyncio.sleep(QUIET_S)
        after = rig.rollout()
        if before and after and after.begun > before.begun:
            report.broken.append(f"{fault}: a rollout step began after /revoke had answered")
        self.say(f"  {fault}: {took:.3f} s")

    async def comes_back(self, fault: str, began: float) -> None:
        """Nobody is left to ask: the device must become free by itself."""
        try:
            await self.rig.until(self.rig.is_free, f"{fault}: the device is free", 20.0)
        except DrillError as error:
            self.report.broken.append(str(error))
        await self._judge(fault, time.monotonic() - began)

    @asynccontextmanager
    async def unseen(self, fault: str) -> AsyncIterator[None]:
        """Serving is there and cannot be seen from now until the block ends."""
        watching = asyncio.create_task(self._watch_unseen(time.monotonic()))
        try:
            yield
        finally:
            watching.cancel()
            grants, back = await watching
            self.report.grants_unseen[fault] = grants
            self.report.memory_back_s[fault] = back
            if back == float("inf") or grants:
                self.report.broken.append(f"{fault}: {grants} grants, memory back after {back:.1f}")
            self.say(f"  {fault}: {grants} grants, memory back after {back:.2f} s")

    async def _watch_unseen(self, began: float) -> tuple[int, float]:
        """Steps that begin after one facts period, and when nothing is held any more."""
        rig = self.rig
        first: int | None = None
        grants, back = 0, float("inf")
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                facts, spent = rig.rollout(), time.monotonic() - began
                if facts is not None and spent > FACTS_S:
                    first = facts.begun if first is None else first
                    grants = facts.begun - first
                if back == float("inf") and rig.is_free():
                    back = spent
                await asyncio.sleep(0.01)
        return grants, back


async def run(say: Say, out: Path, *, quick: bool) -> Report:
    report = Report()
    home = os.environ.get("ROSE_HOME")
    try:
        say("fault drill: a node that owns both engines")
        async with Rig(out, attach=False) as rig:
            await _owned(Drill(rig, report, say), CALM_REVOKES if quick else 5 * CALM_REVOKES)
        say("fault drill: a serving engine of its owner")
        async with Rig(out, attach=True) as rig:
            await _attached(Drill(rig, report, say))
    finally:
        os.environ.pop("ROSE_HOME", None)
        if home is not None:
            os.environ["ROSE_HOME"] = home
    return report


# ---- a node that owns both engines


async def _owned(drill: Drill, calm: int) -> None:
    rig = drill.rig
    rig.start_node()
    await rig.ready()
    rig.start_turns((await rig.status())["rollout"]["url"])
    await _calm(drill, calm)
    await _disk_full(drill)
    await _no_descriptors(drill)
    await _nonsense(drill)
    await _clock_steps(drill)
    await _hung(drill)
    await _warm_up_fails(drill)
    await _node_killed_while_asked(drill)
    await _node_killed_and_rollout_hung(drill)


async def _calm(drill: Drill, times: int) -> None:
    rig = drill.rig
    for number in range(times):
        await rig.lend()
        await asyncio.sleep(0.037 * number % 0.3)  # hit another moment of the step each time
        before = rig.rollout()
        await drill.take_back("nothing")
        after = rig.rollout()
        steps = [facts.step_last_ms for facts in (before, after) if facts is not None]
        took_ms = drill.report.revoke_s["nothing"][-1] * 1e3
        drill.report.beyond_step_ms.append(took_ms - max(steps, default=0.0))


async def _disk_full(drill: Drill) -> None:
    """Neither the node's memo nor its record of a device taken back can be written."""
    rig = drill.rig
    assert rig.node is not None
    await rig.lend()
    memo = rig.page_path.with_suffix(f".{rig.node.pid}")
    mark = rig.logs / "taken-back-cpu0"
    memo.symlink_to("/dev/full")  # every write to it finds the disk full
    (mark / "in the way").mkdir(parents=True)  # nor can any file get its name
    try:
        await drill.take_back("full disk and shared memory")
    finally:
        (mark / "in the way").rmdir()
        mark.rmdir()
        memo.unlink(missing_ok=True)
    if (await rig.status())["offered"]:
        drill.report.broken.append("full disk: the device is still offered")
    try:
        await rig.until(mark.is_file, "full disk: it is recorded when there is room", 5.0)
    except DrillError as error:
        drill.report.broken.append(str(error))


async def _no_descriptors(drill: Drill) -> None:
    rig = drill.rig
    assert rig.node is not None
    await rig.lend()
    await rig.status()  # leaves a connection open
    with contextlib.ExitStack() as stack:
        for pid in (rig.core("serving"), rig.core("rollout")):
            stack.enter_context(without_descriptors(pid))
        stack.enter_context(without_descriptors(rig.node.pid, spare=1))
        await drill.take_back("no file descriptors")


async def _nonsense(drill: Drill) -> None:
    """The scheduler answers what nobody understands: the lease ends, and so does a revocation."""
    rig = drill.rig
    await rig.lend()
    rig.sense = False
    try:
        await asyncio.sleep(3.0)
        await drill.take_back("scheduler answers nonsense")
        await rig.lend()
        state = (await rig.status())["state"]

        async def drained() -> bool:
            return bool((await rig.status())["state"] == "dormant")

        if state == "active":
            await rig.until(drained, "the lease ends with its scheduler's sense", 30.0)
    finally:
        rig.sense = True


async def _clock_steps(drill: Drill) -> None:
    rig = drill.rig
    if rig.clock is None:
        drill.report.left_out.append("wall clock steps: there is no C compiler")
        return
    for name, seconds in (("forward", HOUR_S), ("back", -HOUR_S)):
        await rig.lend()
        rig.set_clock(seconds)
        await _serve_some(drill)
        if rig.page.lending(time.monotonic) is None:
            drill.report.broken.append(f"wall clock {name}: serving cannot be seen any more")
        await drill.take_back(f"wall clock an hour {name}")
        rig.set_clock(0)


async def _serve_some(drill: Drill) -> None:
    rig = drill.rig
    url = (await rig.status())["serving"]["url"]
    rng = random.Random(0)

    async def one() -> None:
        prompt = [rng.randrange(5, 255) for _ in range(60)]
        body = {"model": "tiny-a", "prompt": prompt, "max_tokens": 8}
        async with rig.session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                drill.report.broken.append(f"serving answered {answer.status}")

    await asyncio.gather(*(one() for _ in range(6)))


async def _hung(drill: Drill) -> None:
    rig = drill.rig
    await rig.lend()
    os.kill(rig.core("rollout"), signal.SIGSTOP)
    await drill.take_back("rollout engine hung")


async def _warm_up_fails(drill: Drill) -> None:
    """The engine that was killed comes back: not warmed up while the device is taken back. Lent, it
    is killed in its first steps, and the device taken back at that moment."""
    rig = drill.rig
    old = rig.core("rollout")

    def fresh() -> bool:
        reading = rig.page.rollout()
        return reading is not None and reading.writer.pid != old

    await rig.until(fresh, "the rollout engine is started again", 120.0)
    await rig.ready()
    facts = rig.rollout()
    if facts is None or facts.begun or not rig.is_free():
        drill.report.broken.append("restart: the engine ran on a device that was taken back")
    lending = asyncio.create_task(rig.post("/activate"))
    await rig.until(lambda: (f := rig.rollout()) and f.begun, "its first steps", 30.0)
    os.kill(rig.core("rollout"), signal.SIGKILL)
    await drill.take_back("warm-up failing")
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        await lending
    await rig.until(lambda: rig.core("rollout") not in (old,), "another engine", 60.0)
    await asyncio.sleep(1.0)
    await rig.ready()


async def _node_killed_while_asked(drill: Drill) -> None:
    rig = drill.rig
    assert rig.node is not None
    for delay_s in (0.0, 0.002, 0.02):
        await rig.lend()
        asking = asyncio.create_task(rig.post("/revoke"))
        await asyncio.sleep(delay_s)
        began = time.monotonic()
        rig.node.kill()
        await asyncio.gather(asking, return_exceptions=True)
        await drill.comes_back("node killed while it takes back", began)
        await asyncio.to_thread(rig.node.wait)
        rig.start_node()
        await rig.ready()


async def _node_killed_and_rollout_hung(drill: Drill) -> None:
    """Only the serving engine is left to take its memory back."""
    rig = drill.rig
    assert rig.node is not None
    await rig.lend()
    os.kill(rig.core("rollout"), signal.SIGSTOP)
    began = time.monotonic()
    rig.node.kill()
    await drill.comes_back("node killed and rollout engine hung", began)


# ---- a serving engine of its owner


async def _attached(drill: Drill) -> None:
    rig = drill.rig
    serving = rig.start_serving(rig.serving_port)
    await rig.serves(rig.serving_port)
    rig.start_node()
    await rig.ready()
    rig.start_turns((await rig.status())["rollout"]["url"])
    await _silent(drill)
    await _unreadable(drill)
    await rig.lend()
    async with drill.unseen("serving restarted without rose"):
        kill_tree(serving)
        await asyncio.to_thread(serving.wait)
        stock = rig.start_serving(rig.serving_port, stock=True)
        await rig.serves(rig.serving_port)
        await asyncio.sleep(1.0)
    await drill.take_back("serving restarted without rose")
    kill_tree(stock)
    await asyncio.to_thread(stock.wait)
    await _rolling(drill)


async def _silent(drill: Drill) -> None:
    """Serving's second thread cannot write the page any more: its facts grow old."""
    rig = drill.rig
    await rig.lend()
    with without_writing(rig.core("serving")):
        async with drill.unseen("serving silent"):
            await asyncio.sleep(UNSEEN_S)


async def _unreadable(drill: Drill) -> None:
    """Garbage in serving's half, which it cannot mend."""
    rig = drill.rig
    await rig.lend()
    with without_writing(rig.core("serving")):
        async with drill.unseen("serving's half unreadable"):
            with rig.page_path.open("r+b", buffering=0) as file:
                file.seek(SECTION["serving"])
                file.write(random.Random(1).randbytes(SECTION_SIZE))
            await asyncio.sleep(UNSEEN_S)


async def _rolling(drill: Drill) -> None:
    """A second serving engine comes up beside the first, which then goes."""
    rig = drill.rig
    first = rig.start_serving(rig.serving_port)
    await rig.serves(rig.serving_port)
    await rig.lend()
    rig.start_serving(rig.spare_port)
    await rig.until(lambda: rig.page.rival(time.monotonic()), "the second one is noticed", 90.0)
    async with drill.unseen("two serving engines"):
        await rig.serves(rig.spare_port)
        await asyncio.sleep(2.0)
    async with drill.unseen("the first of two serving engines gone"):
        kill_tree(first)
        await asyncio.to_thread(first.wait)
        await asyncio.sleep(0.2)
    await rig.until(lambda: rig.page.lending(time.monotonic), "the second one is on the page", 20.0)
    await rig.lend()
    await drill.take_back("after a rolling restart")


def ratios(report: Report) -> dict[str, Any]:
    faults = [s for fault, all_ in report.revoke_s.items() if fault != "nothing" for s in all_]
    return {
        "revoke_s_worst_fault": max(faults, default=float("inf")),
        "revoke_beyond_step_ms": max(report.beyond_step_ms, default=float("inf")),
        "grants_unseen": sum(report.grants_unseen.values()),
        "memory_back_s_worst": max(report.memory_back_s.values(), default=float("inf")),
    }
