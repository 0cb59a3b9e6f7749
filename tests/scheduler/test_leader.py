"""What leading engines to new weights must survive: engines that hang, stores that are asked often.

That it leads is shown with a real engine (`tests/engines/test_frontdoor.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from rose.scheduler import weights
from rose.scheduler.core import Scheduler, Start, Stop
from rose.scheduler.fleet import Engine
from rose.scheduler.job import Job
from rose.scheduler.turn import Ask
from rose.scheduler.weights import Leader, Source
from rose.transfer import Publisher
from rose.transfer.store.files import FileStore
from rose.transfer.vllm import client


@pytest.fixture
def core() -> Scheduler:
    core = Scheduler()
    core.jobs = {"a": Job("a")}
    return core


class Calls:
    """What is said to engines, instead of saying it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, staged: int = 1) -> None:
        self.follows = {"store": "", "job": ""}
        self.staged = staged
        self.told: list[Any] = []
        self.while_staging: Callable[[], None] = lambda: None
        for name in ("ranks", "init", "staged", "commit"):
            monkeypatch.setattr(client.EngineClient, name, getattr(self, f"on_{name}"))

    async def on_ranks(self, wanted: int) -> list[dict[str, Any]]:
        return [self.follows]

    async def on_init(self, store: str, job: str, folder: str) -> None:
        self.follows = {"store": store, "job": job}
        self.told.append(("init", store))

    async def on_staged(self, version: int, wait_s: float, *, newer: bool) -> int:
        self.while_staging()
        return self.staged

    async def on_commit(self, version: int) -> client.Updated:
        self.told.append(("commit", version))
        return client.Updated(version, 0.0, 0.0, 0.0)


async def lead(core: Scheduler, leader: Leader, job: str = "a") -> None:
    """As the leader does it, engine by engine."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        leader._lead_all(session, core.jobs[job], leader.sources[job])
        await asyncio.gather(*leader._leading.values())


def test_an_engine_that_hangs_keeps_nobody_from_their_updates(
    core: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CALL_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    commit = client.EngineClient.commit
    Calls(monkeypatch)
    monkeypatch.setattr(client.EngineClient, "commit", commit)

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
    calls = Calls(monkeypatch)

    async def go() -> None:
        engine, lock = Engine("e", "http://127.0.0.1:9"), asyncio.Lock()
        core.join(engine, 0.0)
        core.jobs["a"].lead(1)
        leader = Leader(core, lock)
        leader.follow("a", Source("", "", ""))
        await lock.acquire()  # the trainer's first call
        leading = asyncio.create_task(lead(core, leader))
        await asyncio.sleep(0)
        leader.hold("a")
        lock.release()
        await leading
        assert (calls.told, engine.version) == ([], "")
        leader.release("a")
        await lead(core, leader)
        assert (calls.told, engine.version) == ([("commit", 1)], "1")

    asyncio.run(go())


def test_an_engine_of_another_store_is_told_and_gets_nothing_before(
    core: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is at the same version there: that is another model."""
    calls = Calls(monkeypatch, staged=5)
    calls.follows = {"store": "tcp://other:1", "job": "a"}
    core.jobs["a"].lead(5)
    engine = Engine("e", "http://127.0.0.1:9", version="5")
    core.join(engine, 0.0)

    async def go() -> None:
        leader = Leader(core, asyncio.Lock())
        leader.follow("a", Source("tcp://ours:1", "a", "folder"))
        assert not core.jobs["a"].may_use(engine)
        used: list[bool] = []
        calls.while_staging = lambda: used.append(core.jobs["a"].may_use(engine))
        await lead(core, leader)
        assert used == [False], "it still has the other store's weights"
        assert calls.told == [("init", "tcp://ours:1"), ("commit", 5)]
        assert core.jobs["a"].may_use(engine)
        await lead(core, leader)
        assert len(calls.told) == 2

    asyncio.run(go())


def test_jobs_with_weights_of_their_own_have_engines_of_their_own(
    core: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    core.jobs["b"] = Job("b")
    engines = [Engine(f"e{n}", "http://127.0.0.1:9") for n in range(4)]
    for engine in engines:
        core.join(engine, 0.0)

    async def go() -> None:
        leader = Leader(core, asyncio.Lock())
        for job in ("a", "b"):
            core.jobs[job].lead(1)
            leader.follow(job, Source(f"tcp://{job}:1", job, "folder"))
        assert [sum(e.owner == core.jobs[job].source for e in engines) for job in "ab"] == [3, 1]
        for job in ("a", "b"):
            core.submit(Ask(id=job, job=job, prompt=[1], max_tokens=9), 0.0)
        for _ in range(5):
            leader._moved = -math.inf
            leader.share_out()
        for job in ("a", "b"):
            calls.follows = {"store": "", "job": ""}
            await lead(core, leader, job)

    asyncio.run(go())
    mine = [{e.id for e in engines if core.jobs[job].may_use(e)} for job in "ab"]
    assert [len(one) for one in mine] == [2, 2]
    assert not mine[0] & mine[1]


def test_the_turns_of_an_engine_that_changes_hands_go_on_elsewhere(core: Scheduler) -> None:
    core.jobs["b"] = Job("b")
    for name in ("e0", "e1"):
        core.join(Engine(name, ""), 0.0)

    async def go() -> None:
        leader = Leader(core, asyncio.Lock())
        leader.follow("a", Source("tcp://a:1", "a", "folder"))
        turns = [core.submit(Ask(id=n, job="a", prompt=[1], max_tokens=9), 0.0) for n in "xy"]
        assert len(core.decide(0.0)) == 2
        leader.follow("b", Source("tcp://b:1", "b", "folder"))
        moved = next(e for e in core.engines.values() if e.owner == ("tcp://b:1", "b"))
        assert not moved.turns
        stopped, placed = core.decide(1.0)
        assert isinstance(stopped, Stop) and isinstance(placed, Start)
        assert stopped.turn is placed.turn and placed.turn in turns
        assert {turn.engine for turn in turns} == set(core.engines) - {moved.id}

    asyncio.run(go())


def test_no_engine_changes_hands_in_the_middle_of_something(core: Scheduler) -> None:
    """What a trainer began, a pause or an update, it could not end there any more; an engine that
    is being led would get the weights of its owner before."""
    core.jobs["b"] = Job("b")
    for name in ("e0", "e1"):
        core.join(Engine(name, ""), 0.0)

    def of_b() -> int:
        return sum(engine.owner == ("tcp://b:1", "b") for engine in core.engines.values())

    async def go() -> None:
        leader = Leader(core, asyncio.Lock())
        leader.follow("a", Source("tcp://a:1", "a", "folder"))
        leader.hold("a")
        leader.follow("b", Source("tcp://b:1", "b", "folder"))
        assert of_b() == 0
        leader.release("a")
        leader.paused.add("a")
        leader.share_out()
        assert of_b() == 0
        leader.paused.clear()
        leader._leading = {name: asyncio.create_task(asyncio.sleep(0)) for name in core.engines}
        leader.share_out()
        assert of_b() == 0
        leader._leading.clear()
        leader.share_out()
        assert of_b() == 1

    asyncio.run(go())


def test_versions_of_another_job_do_not_matter(core: Scheduler) -> None:
    """One that is at its fiftieth, say, keeps nobody waiting for fifty of another's."""
    core.jobs["b"] = Job("b", version=50)
    core.jobs["a"].lead(3)
    core.join(engine := Engine("e", "", version="3"), 0.0)
    assert core.jobs["a"].may_use(engine)
    assert not core.jobs["b"].may_use(engine)


def test_a_copy_that_another_run_left_is_not_committed(
    core: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = Calls(monkeypatch, staged=90)
    publisher = Publisher(FileStore(tmp_path / "store", "a"))
    publisher.publish({"w": torch.zeros(9)}, 1)
    core.join(Engine("e", "http://127.0.0.1:9"), 0.0)

    async def go() -> None:
        leader = Leader(core, asyncio.Lock())
        leader.watch("a", Source(f"file://{tmp_path / 'store'}", "a", ""))
        await leader._look("a")
        await lead(core, leader)
        assert ("commit", 90) not in calls.told
        assert "the engine's folder has a copy of another run" in caplog.text
        publisher.publish({"w": torch.ones(9)}, 90)
        leader._not_before.clear()
        await lead(core, leader)
        assert calls.told[-1] == ("commit", 90)

    asyncio.run(go())


@pytest.mark.parametrize("versions", [(), (4, 5), None])
def test_no_turn_goes_to_an_engine_before_the_store_was_asked(
    core: Scheduler, tmp_path: Path, versions: tuple[int, ...] | None
) -> None:
    """`None`: the store does not answer; then, as with an empty one, engines are taken as they are.

    An engine that followed another store has a version that may look new enough."""
    engine = Engine("e", "http://e", version="9")
    core.join(engine, 0.0)
    leader = Leader(core, asyncio.Lock())
    store = FileStore(tmp_path, "math")
    for version in versions or ():
        Publisher(store, wire="float32").publish({"w": torch.ones(8)}, version)
    leader.watch("a", Source(f"file://{tmp_path}", "math", str(tmp_path / "copy")))
    leader.share_out()
    if versions is None:
        leader._watched["a"] = Silent()
    core.submit(Ask(id="1", job="a", prompt=[1], max_tokens=9), 0.0)
    assert core.decide(0.0) == []
    asyncio.run(leader._look("a"))
    started = [action for action in core.decide(0.0) if isinstance(action, Start)]
    assert len(started) == (0 if versions else 1)


class Silent:
    def steps(self) -> Any:
        raise OSError("nobody is there")
