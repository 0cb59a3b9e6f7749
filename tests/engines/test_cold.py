"""The baseline that starts an engine whenever its device is borrowed, with real engines."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import psutil

from rose.bench.cold import ColdNode
from rose.cluster import api
from rose.cluster.config import parse
from rose.executor.facts import LeaseState


def test_a_device_that_was_given_back_has_no_engine_until_it_is_borrowed(
    rose_home: Path, tmp_path: Path
) -> None:
    page = f"/dev/shm/rose-cold-{uuid.uuid4().hex}"
    asyncio.run(borrowed_twice(tmp_path, page))
    assert not Path(page).exists()


async def borrowed_twice(folder: Path, page: str) -> None:
    told = {"device": "cpu:0", "kv_gb": 0.05, "page": page, "port": 0, "log_dir": str(folder),
            "rollout": {"model": "tiny-b"}}  # fmt: skip
    async with api.running(parse(told, "test"), ColdNode) as node:
        assert isinstance(node, ColdNode)
        first = process_of(node)
        await node.activate()
        tokens = await generate(node)
        await node.give_back()
        assert not psutil.pid_exists(first)
        assert await node.revoke() == 0.0  # nothing is there that could be
        assert await node.activate() == 0.0  # is told at once, and comes later
        async with asyncio.timeout(120):
            while process_of(node) == first or not is_active(node):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        second = process_of(node)
        assert await generate(node) == tokens
        await node.give_back()
        assert not psutil.pid_exists(second)
        spent = node.starts_cpu_s
        assert spent > 1.0  # imports alone take longer
        await node.warm_up()
        assert node.starts_cpu_s > spent + 1.0
        assert not is_active(node)  # as other nodes: there, and dormant
        assert psutil.pid_exists(process_of(node))


def process_of(node: ColdNode) -> int:
    assert node.rollout is not None and node.rollout.pid
    return node.rollout.pid


def is_active(node: ColdNode) -> bool:
    reading = node.page.rollout()
    if reading is None or not node.page.processes.alive(reading.writer):
        return False
    return reading.facts.state == LeaseState.ACTIVE


async def generate(node: ColdNode) -> Any:
    assert node.rollout is not None
    body = {"model": "tiny-b", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    async with node.session.post(f"{node.rollout.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["choices"][0]["token_ids"]
