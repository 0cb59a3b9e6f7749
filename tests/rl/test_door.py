"""Turns through a real front door to emulated engines; the scheduler goes away and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.scheduler.conftest import Cluster

from rose.rl.door import Door, DoorError, Sampling

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("door"), 1)
    yield made
    made.close()


async def ask(url: str, id_: str, **more: Any) -> Any:
    async with Door(f"{url}/jobs/default", patience_s=30.0) as door:
        return await door.generate(
            PROMPT, Sampling(max_tokens=9), id_=id_, trajectory="t", seed=1, stop=2, **more
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
