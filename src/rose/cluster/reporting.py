"""A node tells the scheduler how it is, and does what it is answered."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from rose.cluster.node import Node
from rose.net import bearer
from rose.scheduler.lease import Order

log = logging.getLogger("rose.node")

REPORT_S = 2.0
TIMEOUT_S = 5.0
SMOOTHING = 0.1
"""Weight of the newest look in serving's load: about the last twenty seconds."""


async def report(node: Node, scheduler: str, secret: str) -> None:
    """Until cancelled. A scheduler that is away, or says what nobody understands, is asked again;
    the device stays lent for the rest of its term."""
    failing, load, answered = False, 0.0, node.clock()
    while True:
        began, ordered = node.clock(), False
        try:
            load += SMOOTHING * (_busy(node) - load)
            if (said := await _once(node, scheduler, secret, load)) is not None:
                failing, answered, ordered = False, node.clock(), said
        except Exception as error:
            if not failing:
                known = isinstance(error, (aiohttp.ClientError, OSError, ValueError))
                what = str(error) or type(error).__name__
                log.warning("scheduler %s: %s", scheduler, what, exc_info=not known)
            failing = True
            await _end_term(node, node.clock() - answered)
        if not ordered:  # else the scheduler waits to hear that it is done
            await asyncio.sleep(max(0.0, began + REPORT_S - node.clock()))


async def _end_term(node: Node, silent_s: float) -> None:
    if silent_s <= node.config.lease_s:
        return
    try:
        if _is_active(node):
            log.warning("the lease is over: no answer for %.0f s", node.config.lease_s)
            await node.drain()
    except Exception:
        log.exception("the lease is over, and draining failed; trying again")


def _is_active(node: Node) -> bool:
    return bool(node.status()["state"] == "active")


def _busy(node: Node) -> bool:
    serving = node.page.serving()
    return serving is not None and serving.facts.busy


def _memory(node: Node) -> float:
    """Share of its KV cache that the rollout engine could have now; unknown is all."""
    reading = node.page.rollout()
    if reading is None or not reading.facts.kv_max or not reading.facts.kv_may:
        return 1.0
    return reading.facts.kv_may / reading.facts.kv_max


async def _once(node: Node, scheduler: str, secret: str, load: float) -> bool | None:
    """Whether there was an order; None when there was nothing to ask for."""
    rollout = node.rollout
    if not node.ready or rollout is None:
        return None
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
        order = _understood(await answer.json())
    if order == Order.ACTIVATE and node.offered:
        await node.activate()
    elif order == Order.DRAIN and node.offered:  # taken back is a stricter order
        await node.drain()
    return order is not None


def _understood(answer: object) -> Order | None:
    """The order in a scheduler's answer; ValueError for anything else than an order or none."""
    try:
        order = answer["order"]  # type: ignore[index]
        return None if order is None else Order(order)
    except (TypeError, LookupError, ValueError):
        raise ValueError(f"an answer that is no order: {str(answer)[:200]}") from None
