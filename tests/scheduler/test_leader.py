"""What leading engines to new weights must survive: engines that hang, stores that are asked often.

That it leads is shown with a real engine (`tests/engines/test_frontdoor.py`).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from rose.scheduler import weights
from rose.scheduler.core import Job, Scheduler
from rose.scheduler.fleet import Engine
from rose.scheduler.weights import Leader, Source
from rose.transfer import Publisher
from rose.transfer.store.files import FileStore
from rose.transfer.vllm import client


@pytest.fixture
def core() -> Scheduler:
    core = Scheduler()
    core.jobs = {"a": Job("a")}
    return core


def test_an_engine_that_hangs_keeps_nobody_from_their_updates(
    core: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CALL_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def staged(*_: Any, **__: Any) -> int:
        return 1

    monkeypatch.setattr(client.EngineClient, "ranks", staged)
    monkeypatch.setattr(client.EngineClient, "staged", staged)

    async def go() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine, lock = Engine("e", f"http://127.0.0.1:{port}"), asyncio.Lock()
        core.join(engine, 0.0)
        core.jobs["a"].lead(1)
        async with aiohttp.ClientSession() as session, asyncio.timeout(20):
            leader = Leader(core, lock)
            leading = leader._lead(
                client.EngineClient(session, engine.url), engine, Source("", "", ""), core.jobs["a"]
            )
            await leading
        assert not lock.locked()
        assert engine.version == ""
        server.close()

    asyncio.run(go())


def test_a_store_is_opened_once_however_often_it_is_asked(
    core: Scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(FileStore(tmp_path / "store", "a"))
    opened, real = [], weights.open_store

    def open_store(url: str, job: str) -> Any:
        opened.append(url)
        return real(url, job)

    monkeypatch.setattr(weights, "open_store", open_store)

    async def go() -> None:
        leader = Leader(core, asyncio.Lock())
        leader.watch("a", Source(f"file://{tmp_path / 'store'}", "a", ""))
        for version in (3, 4):
            publisher.publish({"w": torch.full((9,), float(version))}, version)
            await leader._look("a")
            assert core.jobs["a"].version == version

    asyncio.run(go())
    assert len(opened) == 1


def test_no_engine_is_led_while_a_trainer_updates_it(
    core: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's update is several calls; what is led in between would end up half of each."""
    committed: list[int] = []

    async def staged(*_: Any, **__: Any) -> int:
        return 1

    async def commit(_: Any, version: int) -> client.Updated:
        committed.append(version)
        return client.Updated(version, 0.0, 0.0, 0.0)

    monkeypatch.setattr(client.EngineClient, "ranks", staged)
    monkeypatch.setattr(client.EngineClient, "staged", staged)
    monkeypatch.setattr(client.EngineClient, "commit", commit)

    async def go() -> None:
        engine, lock = Engine("e", "http://127.0.0.1:9"), asyncio.Lock()
        core.join(engine, 0.0)
        core.jobs["a"].lead(1)
        async with aiohttp.ClientSession() as session, asyncio.timeout(20):
            leader = Leader(core, lock)

            async def lead() -> None:
                found = client.EngineClient(session, engine.url)
                await leader._lead(found, engine, Source("", "", ""), core.jobs["a"])

            await lock.acquire()  # the trainer's first call
            leading = asyncio.create_task(lead())
            await asyncio.sleep(0)
            leader.hold("a")
            lock.release()
            await leading
            assert (committed, engine.version) == ([], "")
            leader.release("a")
            await lead()
            assert (committed, engine.version) == ([1], "1")

    asyncio.run(go())
