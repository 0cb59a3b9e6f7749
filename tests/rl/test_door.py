"""Turns through a real front door to emulated engines; the scheduler goes away and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scheduler.conftest import Cluster, call

from rose.net import bearer
from rose.rl.door import Door, DoorError, Sampling
from rose.rl.report import read
from rose.rl.watch import FILE, watching
from rose.rl.weight_sync import WeightSync
from rose.transfer.errors import TransferError

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("door"), 1)
    yield made
    made.close()


async def ask(url: str, id_: str, secret: str = "") -> Any:
    async with Door(f"{url}/jobs/default", secret=secret, patience_s=30.0) as door:
        return await door.generate(
            PROMPT, Sampling(max_tokens=9), id_=id_, trajectory="t", seed=1, stop=2
        )


def test_a_turn_is_had_once_however_often_it_is_asked_for(cluster: Cluster) -> None:
    first, again = (asyncio.run(ask(cluster.url, "run/0/1.0/0")) for _ in range(2))
    assert first == again
    assert len(first.tokens) == len(first.logprobs) == 9


def test_a_scheduler_that_comes_back_has_the_turn(cluster: Cluster) -> None:
    first = asyncio.run(ask(cluster.url, "run/0/1.0/1"))
    cluster.scheduler.end()

    async def go() -> Any:
        asking = asyncio.create_task(ask(cluster.url, "run/0/1.0/1"))
        await asyncio.sleep(0.3)
        cluster.scheduler.start()
        return await asking

    assert asyncio.run(go()) == first


def test_what_is_wrong_is_not_asked_again(cluster: Cluster) -> None:

    async def go() -> None:
        async with Door(f"{cluster.url}/jobs/nobody", patience_s=30.0) as door:
            await door.generate(PROMPT, Sampling(), id_="a", trajectory="t", seed=1, stop=2)

    with pytest.raises(DoorError, match="no job nobody"):
        asyncio.run(go())


def test_a_door_that_never_comes_back_is_said() -> None:
    async def go() -> None:
        async with Door("http://127.0.0.1:9", patience_s=0.2) as door:
            await door.generate(PROMPT, Sampling(), id_="a", trajectory="t", seed=1, stop=2)

    with pytest.raises(DoorError, match="for 0 s"):
        asyncio.run(go())


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("ROSE_SCHEDULER_SECRET", "sesame")
    made = Cluster(tmp_path, 1)
    yield made
    made.close()


def test_a_guarded_door_opens_to_those_who_know_the_secret(guarded: Cluster) -> None:
    said = asyncio.run(ask(guarded.url, "run/0/1.0/0", "sesame"))
    assert len(said.tokens) == 9
    for wrong in ("", "simsalabim"):
        with pytest.raises(DoorError, match="401"):
            asyncio.run(ask(guarded.url, "run/0/1.0/1", wrong))
        assert call(f"{guarded.url}/rose/v1/status", headers=bearer(wrong))[0] == 401
    assert call(f"{guarded.url}/health")[0] == 200
    assert call(f"{guarded.url}/jobs/default/health")[0] == 200


def test_weights_go_through_a_guarded_door(guarded: Cluster) -> None:
    def opened(secret: str) -> None:
        sync = WeightSync("file:///nowhere", secret=secret, patience_s=0.1)
        sync.open(guarded.url)

    with pytest.raises(TransferError, match="401"):
        opened("")
    with pytest.raises(TransferError, match="404"):  # emulated engines do not say what they are
        opened("sesame")


def test_the_fleet_is_watched_through_a_guarded_door(guarded: Cluster, tmp_path: Path) -> None:
    async def looks(secret: str) -> int:
        async with watching(guarded.url, tmp_path, secret):
            await asyncio.sleep(0.5)
        return len(read(tmp_path / FILE))

    assert asyncio.run(looks("")) == 0
    assert asyncio.run(looks("sesame")) >= 1
