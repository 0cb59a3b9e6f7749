"""The node's orders: nothing but the owner's word activates a device that was taken back."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.stage import Stage, until

from rose.cluster import node as module
from rose.cluster.config import ConfigError
from rose.cluster.custody import Overtaken, TakenBack
from rose.cluster.node import Node
from rose.executor.facts import LeaseState
from rose.executor.page import SECTION, Page

ACTIVE, DORMANT = LeaseState.ACTIVE, LeaseState.DORMANT


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 60.0))


def ordered(node: Node) -> tuple[int, int]:
    """State and offered, as they stand on the page."""
    reading = node.page.node()
    assert reading is not None
    return reading.facts.state, reading.facts.offered


def done(node: Node) -> int:
    reading = node.page.rollout()
    assert reading is not None
    return reading.facts.state


def test_a_node_wakes_its_engine_once_and_leaves_it_dormant(stage: Stage) -> None:
    async def scene() -> None:
        states: list[int] = []

        async def steps() -> None:
            states.append(stage.engine("rollout").page.node().facts.state)  # type: ignore[union-attr]

        stage.first_steps = steps
        async with stage.node() as node:
            assert states == [ACTIVE]
            assert (ordered(node), done(node)) == ((DORMANT, 1), DORMANT)
            assert not node.custody.cold
            assert await node.activate() >= 0.0
            assert states == [ACTIVE]
            assert done(node) == ACTIVE
        assert not stage.config.page_path.exists()

    play(scene())


def test_what_was_taken_back_is_activated_by_the_owners_word_alone(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            await node.lend()
            await node.take_back()
            assert (ordered(node), done(node)) == ((DORMANT, 0), DORMANT)
            for order in (node.activate, node.drain, node._warm_up):
                if order == node._warm_up:
                    await order()
                    continue
                with pytest.raises(TakenBack):
                    await order()
            assert ordered(node) == (DORMANT, 0)
            await node.revoke()
            assert ordered(node) == (DORMANT, 0)
            await node.lend()
            assert (ordered(node), done(node)) == ((ACTIVE, 1), ACTIVE)

    play(scene())


def test_an_engine_that_is_started_again_sleeps_while_the_device_is_taken_back(
    stage: Stage,
) -> None:
    async def scene() -> None:
        steps: list[int] = []

        async def step() -> None:
            steps.append(1)

        stage.first_steps = step
        async with stage.node() as node:
            await node.lend()
            await node.take_back()
            first = stage.engine("rollout")
            epochs = [node.custody.epoch]
            stage.host.dead.add(first.writer)
            await until(lambda: node.restarts["rollout"] == 1 and node.ready)
            assert stage.engine("rollout") is not first
            assert len(steps) == 1
            assert node.custody.cold
            assert (ordered(node), done(node)) == ((DORMANT, 0), DORMANT)
            assert node.custody.epoch > epochs[0]
            await node.lend()  # its first steps have waited for this
            assert len(steps) == 2
            assert (node.custody.cold, done(node)) == (False, ACTIVE)

    play(scene())


@pytest.mark.parametrize("error", [ConfigError("no answer"), ValueError("broken")])
def test_a_warm_up_that_fails_leaves_the_engine_dormant(stage: Stage, error: Exception) -> None:
    async def scene() -> None:
        async with stage.node() as node:

            async def steps() -> None:
                raise error

            stage.first_steps = steps
            stage.host.dead.add(stage.engine("rollout").writer)
            await until(lambda: node.restarts["rollout"] == 1 and node.ready)
            assert (ordered(node), done(node)) == ((DORMANT, 1), DORMANT)
            assert node.custody.cold
            with pytest.raises(type(error)):
                await node.lend()
            assert (ordered(node), done(node)) == ((DORMANT, 1), DORMANT)

    play(scene())


def test_a_node_whose_engine_fails_its_first_steps_does_not_start_and_leaves_nothing(
    stage: Stage,
) -> None:
    async def scene() -> None:
        async def steps() -> None:
            raise ConfigError("the rollout engine fails to generate")

        stage.first_steps = steps
        with pytest.raises(ConfigError, match="fails to generate"):
            async with stage.node():
                pass
        assert not any(engine.alive for engine in stage.engines)
        await stage.curtain()
        assert not stage.config.page_path.exists()

    play(scene())


def test_an_owner_who_takes_back_during_a_warm_up_is_obeyed(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            warming, taken = asyncio.Event(), asyncio.Event()

            async def steps() -> None:
                warming.set()
                await taken.wait()

            stage.first_steps = steps
            stage.host.dead.add(stage.engine("rollout").writer)
            await warming.wait()
            await node.take_back()
            assert done(node) == DORMANT
            taken.set()
            await until(lambda: node.ready)
            assert (ordered(node), done(node)) == ((DORMANT, 0), DORMANT)

    play(scene())


def test_an_owner_who_lends_during_a_warm_up_is_obeyed(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            warming, lent = asyncio.Event(), asyncio.Event()

            async def steps() -> None:
                warming.set()
                await lent.wait()

            stage.first_steps = steps
            stage.host.dead.add(stage.engine("rollout").writer)
            await warming.wait()
            lending = asyncio.create_task(node.lend())
            await until(lambda: node.custody.epoch and done(node) == ACTIVE)
            lent.set()
            await lending
            await until(lambda: node.ready)
            assert (ordered(node), done(node)) == ((ACTIVE, 1), ACTIVE)

    play(scene())


def test_taking_back_is_on_the_page_before_anything_else_is_done(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            await node.lend()
            seen: list[tuple[int, int]] = []
            monkeypatch.setattr(node, "_remember", lambda: seen.append(ordered(node)))
            monkeypatch.setattr(node, "_lift_rollout", lambda: seen.append(ordered(node)))
            await node.take_back()
            assert seen == [(DORMANT, 0)] * 2

    play(scene())


def full(_: Path, __: str) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_taking_back_needs_no_disk_and_is_remembered_as_soon_as_there_is_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            await node.lend()
            with monkeypatch.context() as patch:
                patch.setattr(Path, "write_text", full)
                await node.take_back()
                assert (ordered(node), done(node)) == ((DORMANT, 0), DORMANT)
                assert node._memo.unwritten
            await until(lambda: not node._memo.unwritten)
            assert node._memo._taken_back.exists()

    play(scene())


def test_taking_back_is_remembered_even_if_the_engine_cannot_be_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        monkeypatch.setattr(module, "REVOKE_S", 0.1)
        async with stage.node() as node:
            await node.lend()
            engine = stage.engine("rollout")
            engine.deaf = engine.unkillable = True
            with pytest.raises(TimeoutError, match=r"cannot be killed: the kernel holds it"):
                await node.take_back()
            assert ordered(node) == (DORMANT, 0)
            assert stage.host.killed == [engine.writer]
            assert node._memo._taken_back.exists()
            engine.unkillable = False

    play(scene())


@pytest.mark.parametrize("torn", [False, True])
def test_an_engine_that_does_not_let_go_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    async def scene() -> None:
        monkeypatch.setattr(module, "REVOKE_S", 0.1)
        async with stage.node() as node:
            await node.lend()
            engine = stage.engine("rollout")
            engine.deaf = True
            if torn:
                os.pwrite(node.page._fd, struct.pack("<I", 3), SECTION["rollout"])
            await node.take_back()
            assert stage.host.killed == [engine.writer]
            assert node.kills == 1
            assert ordered(node) == (DORMANT, 0)

    play(scene())


def test_an_engine_with_turns_left_is_not_dormant_yet(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        monkeypatch.setattr(module, "REVOKE_S", 30.0)
        async with stage.node() as node:
            await node.lend()
            engine = stage.engine("rollout")
            engine.turns = 1
            taking = asyncio.create_task(node.take_back())
            await until(lambda: done(node) == DORMANT)
            await asyncio.sleep(0.1)
            assert not taking.done()
            engine.turns = 0
            await taking
            assert node.kills == 0

    play(scene())


def test_an_order_that_another_one_overtakes_is_not_waited_for(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            stage.engine("rollout").deaf = True
            lending = asyncio.create_task(node.lend())
            await until(lambda: ordered(node) == (ACTIVE, 1))
            taking = asyncio.create_task(node.take_back())
            with pytest.raises(Overtaken, match="it was ordered to be dormant"):
                await lending
            assert not taking.done()
            stage.engine("rollout").deaf = False
            await taking
            assert (ordered(node), done(node)) == ((DORMANT, 0), DORMANT)

    play(scene())


def test_orders_are_repeated_and_heal_a_page_that_lost_them(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            await node.lend()
            for _ in range(3):
                os.truncate(node.page.path, 0)
                await until(lambda: node.page.node() is not None)
                assert ordered(node) == (ACTIVE, 1)
            await until(lambda: not node.page.mend(node.clock))
            Page.open(node.page.path).close()

    play(scene())
