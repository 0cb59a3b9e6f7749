"""How fast a device is taken back: memory under pressure, revocation, activation, sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import psutil

from rose import models
from rose.bench import rollouts
from rose.bench.arrivals import LogNormal
from rose.bench.colocated import Workload, settle
from rose.bench.stats import percentiles
from rose.bench.traffic import VOCABULARY
from rose.cluster.node import Node
from rose.executor.facts import RolloutFacts
from rose.executor.memory import POLICIES, low_water

NEEDED_SHARE = 0.25
"""Of the device's KV: what serving suddenly wants in every round."""
DORMANT_S = 10.0
FILL_S = 90.0
JUMP_S = 2.0
JUMP_EVERY_S = 12.0
HUNGRY = replace(
    Workload(0.0, False).rollouts,
    prompt_tokens=LogNormal(144, 0.2, 224),
    turn_tokens=LogNormal(64, 0.4, 128),
    think_s=0.0,
)
"""Rollouts whose contexts fill most of the KV memory."""
MODEST = replace(
    HUNGRY,
    in_flight=12,
    prompt_tokens=LogNormal(96, 0.2, 160),
    turn_tokens=LogNormal(48, 0.4, 96),
)
"""Rollouts whose contexts have about 2,450 tokens: two fifths of 0.25 GiB, a fifth of 0.5 GiB. For
a full batch of such turns they hold most of either, if they may."""


async def measure(node: Node, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Rollout holds most of the KV; serving's demand jumps; how long until serving has it?"""
    stop = asyncio.Event()
    assert node.rollout is not None and node.serving is not None
    node.rule, node.preemptible = "rose", True
    taken: list[float] = []
    steps: list[float] = []
    await node.activate()
    rolling = asyncio.create_task(
        rollouts.drive(node.rollout.url, HUNGRY, stop, model=node.config.rollout.model)
    )
    try:
        for number in range(rounds):
            await _rollout_regrows(node)
            seconds, step = await _jump(node, seed=number)
            taken.append(seconds)
            steps.append(step)
            await settle(node)
    finally:
        stop.set()
        record = await rolling
        await node.revoke()
    worst = percentiles(taken)
    step_worst = percentiles(steps)
    assert worst is not None and step_worst is not None
    say(
        f"  reclaim of {NEEDED_SHARE:.0%} of the KV: p99 {worst.p99 * 1e3:.0f} ms over {rounds} "
        f"rounds, longest rollout step meanwhile {step_worst.worst * 1e3:.0f} ms"
    )
    return {
        "reclaim_s": taken,
        "rollout_step_s": steps,
        "ended_turns": dict(record.aborts),
        "ratios": {
            "reclaim_ms_p99": worst.p99 * 1e3,
            "reclaim_beyond_step_ms": max(
                (took - step) * 1e3 for took, step in zip(taken, steps, strict=True)
            ),
        },
    }


async def compare_policies(node: Node, jumps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Rollout tokens/s under the same repeated memory jumps, per memory policy."""
    assert node.rollout is not None
    speeds: dict[str, float] = {}
    for policy in POLICIES:
        node.memory_policy = policy
        await node.activate()
        stop = asyncio.Event()
        rolling = asyncio.create_task(
            rollouts.drive(node.rollout.url, HUNGRY, stop, model=node.config.rollout.model)
        )
        await asyncio.sleep(JUMP_EVERY_S)
        for number in range(jumps):
            async with _demand(node, seed=100 + number):
                await asyncio.sleep(JUMP_S)
            await asyncio.sleep(JUMP_EVERY_S)
        stop.set()
        record = await rolling
        speeds[policy] = record.tokens / record.span_s
        await node.revoke()
        say(f"  {policy}: {speeds[policy]:.1f} rollout tokens/s under {jumps} memory jumps")
    node.memory_policy = node.config.rollout.memory_policy
    return {
        "rollout_tok_s": speeds,
        "ratios": {
            f"{policy}_vs_halve_and_freeze": speeds[policy] / speeds["halve_and_freeze"]
            for policy in ("trim", "aimd")
        },
    }


async def _rollout_regrows(node: Node) -> None:
    """Wait until rollout holds most of the device again."""
    deadline = time.monotonic() + FILL_S
    most = (1.0 - node.config.headroom) * node.page.kv_total
    while time.monotonic() < deadline:
        reading = node.page.rollout()
        facts = reading.facts if reading is not None else None
        if facts and facts.kv_resident > 0.9 * most and facts.kv_used > 0.5 * most:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("rollouts did not fill their share of the memory")


async def _jump(node: Node, seed: int) -> tuple[float, float]:
    """One jump of serving's demand: seconds until its quota has risen by what it needs."""
    before = node.page.serving()
    assert before is not None
    wanted = before.facts.kv_quota + int(NEEDED_SHARE * node.page.kv_total)
    watching = asyncio.create_task(_until_quota(node, wanted))
    async with _demand(node, seed):
        return await watching


@asynccontextmanager
async def _demand(node: Node, seed: int) -> AsyncIterator[None]:
    """Long serving prompts that need `NEEDED_SHARE` of the KV; their clients go away at the end."""
    tokens = _tokens_for(node, int(NEEDED_SHARE * node.page.kv_total))
    length = min(512, tokens)
    async with aiohttp.ClientSession() as session:
        sending = [
            asyncio.create_task(_abandon(session, node, length, seed * 1000 + i))
            for i in range(-(-tokens // length))
        ]
        try:
            yield
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)


async def _abandon(session: aiohttp.ClientSession, node: Node, length: int, seed: int) -> None:
    """A long prompt whose client goes away once the memory question is answered."""
    assert node.serving is not None and node.config.serving is not None
    low, high = VOCABULARY
    prompt = [low + (seed * 7919 + i * 31) % (high - low) for i in range(length)]
    body = {"model": node.config.serving.model, "prompt": prompt, "max_tokens": 4}
    async with session.post(f"{node.serving.url}/v1/completions", json=body) as answer:
        await answer.read()


async def _until_quota(node: Node, wanted: int) -> tuple[float, float]:
    """From the moment the page says that serving lacks memory until its quota covers it."""
    return await asyncio.to_thread(_poll_quota, node, wanted)


def _poll_quota(node: Node, wanted: int) -> tuple[float, float]:
    low = low_water(node.page.kv_total, node.config.headroom)
    jumped, granted = 0.0, 0
    longest = 0.0
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        serving, rollout = node.page.serving(), node.page.rollout()
        if serving is not None and rollout is not None:
            now = time.monotonic()
            left = node.page.kv_total - rollout.facts.kv_claim - serving.facts.kv_need
            if not jumped and left < low:
                jumped, granted = now, rollout.facts.granted
            longest = max(longest, _step_since(rollout.facts, granted) if jumped else 0.0)
            if serving.facts.kv_quota >= min(wanted, serving.facts.kv_max):
                if not jumped:
                    return 0.0, 0.0  # blocks that nobody used: given within one look
                time.sleep(0.1)  # the step in flight is told a moment after its memory is given
                last = node.page.rollout()
                return now - jumped, max(longest, _step_since(last.facts, granted) if last else 0.0)
        time.sleep(0.001)
    raise RuntimeError("serving did not get its memory within a minute")


def _step_since(facts: RolloutFacts, granted: int) -> float:
    """The latest rollout step, if it ended after so many others."""
    return facts.step_last_ms / 1e3 if facts.granted > granted else 0.0


def _tokens_for(node: Node, needed: int) -> int:
    """Prompt tokens whose KV takes `needed` bytes."""
    assert node.config.serving is not None
    return needed // models.kv_bytes_per_token(models.resolve(node.config.serving.model))


async def orders(node: Node, repeats: int) -> dict[str, Any]:
    """Activation and revocation under full rollout load, and what sleeping costs."""
    assert node.rollout is not None
    revoked: list[float] = []
    activated: list[float] = []
    steps: list[float] = []
    for number in range(repeats):
        activated.append(await node.activate())
        stop = asyncio.Event()
        plan = replace(Workload(0.0, False).rollouts, think_s=0.0, seed=number)
        rolling = asyncio.create_task(
            rollouts.drive(node.rollout.url, plan, stop, model=node.config.rollout.model)
        )
        await asyncio.sleep(2.0 + 0.13 * number)  # hit another moment of the step each time
        before = node.page.rollout()
        revoked.append(await node.revoke())
        after = node.page.rollout()  # by now it tells of the step that was in flight
        steps.append(max(r.facts.step_last_ms for r in (before, after) if r is not None))
        stop.set()
        await rolling
    await settle(node)
    dormant = await _cpu_percent(node)
    reading = node.page.rollout()
    worst_revoke, worst_activate = percentiles(revoked), percentiles(activated)
    assert worst_revoke is not None and worst_activate is not None and reading is not None
    return {
        "revoke_s": revoked,
        "activate_s": activated,
        "rollout_step_ms": steps,
        "ratios": {
            "revoke_ms_p99": worst_revoke.p99 * 1e3,
            "revoke_vs_step": worst_revoke.p99 * 1e3 / max(steps),
            "activate_s_worst": worst_activate.worst,
            "dormant_cpu_percent": dormant,
            "dormant_kv_bytes": reading.facts.kv_resident,
        },
    }


async def _cpu_percent(node: Node) -> float:
    """CPU of all processes of the dormant rollout engine, in percent of one core."""
    assert node.rollout is not None

    def spent() -> float:
        total = 0.0
        for member in node.rollout.family() if node.rollout else []:
            times = psutil.Process(member.pid).cpu_times()
            total += times.user + times.system
        return total

    before = spent()
    await asyncio.sleep(DORMANT_S)
    return 100.0 * (spent() - before) / DORMANT_S
