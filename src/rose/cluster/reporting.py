"""A node tells the scheduler how it is, and does what it is answered."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from rose.cluster.node import Node
from rose.net import bearer

log = logging.getLogger("rose.node")

REPORT_S = 2.0
TIMEOUT_S = 5.0
SMOOTHING = 0.1
"""Weight of the newest look in serving's load: about the last twenty seconds."""


async def report(node: Node, scheduler: str, secret: str) -> None:
    """Until cancelled. A scheduler that is away is asked again; the device stays lent for the rest
    of its term."""
    failing, load, answered = False, 0.0, time.monotonic()
    while True:
        load += SMOOTHING * (_busy(node) - load)
        began, ordered = time.monotonic(), False
        try:
            ordered = await _once(node, scheduler, secret, load)
            failing, answered = False, time.monotonic()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if not failing:
                log.warning("scheduler %s: %s", scheduler, error or type(error).__name__)
            failing = True
            if time.monotonic() - answered > node.config.lease_s and _is_active(node):
                log.warning("the lease is over: no answer for %.0f s", node.config.lease_s)
                await node.drain()
        if not ordered:  # else the scheduler waits to hear that it is done
            await asyncio.sleep(max(0.0, began + REPORT_S - time.monotonic()))


def _is_active(node: Node) -> bool:
    return bool(node.status()["state"] == "active")


def _busy(node: Node) -> bool:
    serving = node.page.serving()
    return serving is not None and serving.facts.busy


def _memory(node: Node) -> float:
    """Share of its KV cache that the rollout engine may use; unknown is all."""
    reading = node.page.rollout()
    if reading is None or not reading.facts.kv_max or not reading.facts.kv_resident:
        return 1.0
    return reading.facts.kv_resident / reading.facts.kv_max


async def _once(node: Node, scheduler: str, secret: str, load: float) -> bool:
    """Whether there was an order."""
    rollout = node.rollout
    if not node.ready or rollout is None:
        return False
    word = {
        "node": node.url,
        "engine": rollout.url,
        "dedicated": node.config.serving is None,
        "active": _is_active(node),
        "offered": node.offered,
        "load": round(load, 3),
        "memory": round(_memory(node), 3),
        "places": node.config.rollout.max_seqs,
        "wait_s": REPORT_S,
    }
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    url = f"{scheduler.rstrip('/')}/rose/v1/nodes"
    async with node.session.post(url, json=word, headers=bearer(secret), timeout=timeout) as answer:
        if answer.status != 200:
            raise ValueError(f"{answer.status} {(await answer.text())[:200]}")
        order = (await answer.json())["order"]
    if order == "activate" and node.offered:
        await node.activate()
    elif order == "drain" and node.offered:  # a device that was taken back has a stricter order
        await node.drain()
    return order is not None
