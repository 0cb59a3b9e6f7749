"""Nodes one after the other: what was taken back stays so, whatever is lost in between."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.stage import Actor, Stage, until

from rose.cluster.config import ConfigError
from rose.cluster.custody import TakenBack
from rose.cluster.launcher import _end_engines
from rose.cluster.memo import Memo
from rose.cluster.node import Node
from rose.executor.facts import LeaseState
from rose.executor.page import SECTION, Page

ACTIVE, DORMANT = LeaseState.ACTIVE, LeaseState.DORMANT


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 60.0))


def traces(stage: Stage) -> set[str]:
    """Where it stands that the device was taken back."""
    config, found = stage.config, set()
    memo = Memo.of(config)
    if memo._taken_back.exists():
        found.add("mark")
    if memo.path.exists() and '"offered": false' in memo.path.read_text():
        found.add("memo")
    if config.page_path.exists():
        page = Page.open(config.page_path)
        reading = page.node()
        page.close()
        if reading is not None and not reading.facts.offered:
            found.add("page")
    return found


async def stay_taken_back(stage: Stage) -> None:
    """A new node does not lend the device, until its owner says so, and forgets it then."""
    steps: list[int] = []

    async def step() -> None:
        steps.append(1)

    stage.first_steps = step
    async with stage.node() as node:
        assert not node.offered
        assert not steps
        with pytest.raises(TakenBack):
            await node.activate()
        reading = node.page.node()
        assert reading is not None
        assert (reading.facts.state, reading.facts.offered) == (DORMANT, 0)
        await node.lend()
        assert node.offered
        assert traces(stage) == set()
        assert steps
    async with stage.node() as node:
        assert node.offered


async def started(stage: Stage) -> Node:
    node = Node(stage.config)
    await node.start()
    return node


async def take_back_and_stop(stage: Stage) -> None:
    async with stage.node() as node:
        await node.take_back()


async def take_back_and_be_killed(stage: Stage) -> None:
    node = await started(stage)
    await node.take_back()
    await stage.killed(node)


End = Callable[[Stage], Awaitable[None]]


def test_after_a_clean_stop_the_mark_in_the_log_folder_says_it(stage: Stage) -> None:
    async def scene() -> None:
        await take_back_and_stop(stage)
        assert traces(stage) == {"mark"}
        await stay_taken_back(stage)

    play(scene())


@pytest.mark.parametrize("left", ["mark", "memo", "page"])
def test_after_a_kill_any_trace_is_enough(stage: Stage, left: str) -> None:
    async def scene() -> None:
        await take_back_and_be_killed(stage)
        assert traces(stage) == {"mark", "memo", "page"}
        memo = Memo.of(stage.config)
        paths = {"mark": memo._taken_back, "memo": memo.path, "page": stage.config.page_path}
        for name, path in paths.items():
            if name != left:
                path.unlink()
        assert traces(stage) == {left}
        await stay_taken_back(stage)

    play(scene())


def test_a_node_killed_right_after_the_order_has_left_it_on_the_page(stage: Stage) -> None:
    async def scene() -> None:
        node = await started(stage)
        await node.lend()
        node.custody.take_back()
        node._publish()
        await stage.killed(node)
        assert traces(stage) == {"page"}
        await stay_taken_back(stage)

    play(scene())


def full(_: Path, __: str) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_marks(self: Path, text: str) -> int:
    if "taken-back" in self.name:
        raise OSError(errno.ENOSPC, "No space left on device")
    return self.write_bytes(text.encode())


@pytest.mark.parametrize("write", [full, no_marks])
@pytest.mark.parametrize("end", [take_back_and_stop, take_back_and_be_killed])
def test_where_no_disk_takes_it_the_page_stays_for_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, end: End, write: Callable[[Path, str], int]
) -> None:
    async def scene() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", write)
            await end(stage)
        assert "page" in traces(stage)
        await stay_taken_back(stage)

    play(scene())


@pytest.mark.parametrize("write", [full, no_marks, Path.write_text])
def test_whoever_clears_up_after_a_killed_node_forgets_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, str], int]
) -> None:
    async def scene() -> None:
        node = await started(stage)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", write)
            await node.take_back()
            await stage.killed(node)
            await _end_engines(stage.config, [os.getpid()])
        assert traces(stage)
        await stay_taken_back(stage)

    play(scene())


def test_whoever_clears_up_after_a_node_that_lent_leaves_nothing(stage: Stage) -> None:
    async def scene() -> None:
        node = await started(stage)
        await node.lend()
        await stage.killed(node)
        await _end_engines(stage.config, [os.getpid()])
        assert not stage.config.page_path.exists()
        assert not Memo.of(stage.config).path.exists()
        async with stage.node() as node:
            assert node.offered

    play(scene())


def test_a_page_that_is_lost_while_the_node_lives_changes_nothing_for_the_next_one(
    stage: Stage,
) -> None:
    async def scene() -> None:
        node = await started(stage)
        await node.take_back()
        stage.config.page_path.unlink()
        await stage.killed(node)
        await stay_taken_back(stage)

    play(scene())


def test_a_device_that_was_never_taken_back_is_offered_after_everything(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            assert node.offered
            await node.lend()
        node = await started(stage)
        assert node.offered
        await node.drain()
        await stage.killed(node)
        assert traces(stage) == set()
        async with stage.node() as node:
            assert node.offered

    play(scene())


def test_a_device_has_one_node(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            await node.lend()
            with pytest.raises(ConfigError, match="cpu:0 already has a node"):
                await started(stage)
            reading = node.page.node()
            assert reading is not None
            assert reading.facts.state == ACTIVE
            assert node.offered

    play(scene())


# ---- engines that nobody remembers


def test_a_rollout_engine_that_nobody_remembers_is_ended_first(stage: Stage) -> None:
    async def scene() -> None:
        stranger = Actor("rollout", stage.config, stage.host).play()
        stage.engines.append(stranger)
        await until(lambda: stranger.opened.is_set() and stranger.page.rollout())
        async with stage.node() as node:
            assert stage.host.killed == [stranger.writer]
            assert stage.engine("rollout") is not stranger
            assert node.offered

    play(scene())


def test_a_serving_engine_that_nobody_remembers_is_left_to_its_users(stage: Stage) -> None:
    async def scene() -> None:
        stranger = Actor("serving", stage.config, stage.host).play()
        stage.engines.append(stranger)
        await until(lambda: stranger.opened.is_set() and stranger.page.serving())
        with pytest.raises(ConfigError, match=f"process {stranger.pid}, which this node did not"):
            await started(stage)
        assert stranger.alive
        assert stage.host.killed == []
        await stage.curtain()

    play(scene())


# ---- what the node sees to


def test_a_serving_engine_that_is_not_seen_is_said_and_lent_beside_no_more(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            await node.lend()
            assert node.status()["serving_seen"] is True
            rollout, serving = stage.engine("rollout"), stage.engine("serving")
            serving.deaf = True
            await until(lambda: "serving is not seen" in caplog.text)
            assert node.status()["serving_seen"] is False
            await until(lambda: not rollout.blocks.usable)
            serving.deaf = False
            await until(lambda: "seen on the page again" in caplog.records[-1].getMessage())
            await until(lambda: rollout.blocks.usable)
            assert stage.host.killed == []

    caplog.set_level("INFO", "rose.node")
    play(scene())


def test_an_engine_part_of_which_lives_on_is_not_started_beside_it(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            engine = stage.engine("rollout")
            engine.unkillable = True
            stage.host.dead.add(engine.writer)
            await asyncio.sleep(0.2)
            assert node.restarts["rollout"] == 0
            engine.unkillable = False
            await until(lambda: node.restarts["rollout"] == 1 and node.ready)

    play(scene())


def test_a_stopped_engine_is_killed_and_started_again(stage: Stage) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            await node.lend()
            engine = stage.engine("rollout")
            engine.deaf = True
            stage.host.frozen.add(engine.writer)
            await until(lambda: node.restarts["rollout"] == 1 and node.ready)
            assert engine.writer in stage.host.killed
            assert node.kills == 1

    play(scene())


@pytest.mark.parametrize("broken", ["mend", "rival", "serving", "rollout_writer"])
def test_what_fails_to_be_looked_at_keeps_nothing_else_from_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    async def scene() -> None:
        async with stage.node() as node:

            def fail(*_: object) -> None:
                raise OSError(errno.EIO, "broken on purpose")

            with monkeypatch.context() as patch:
                patch.setattr(node.page, broken, fail)
                os.pwrite(node.page._fd, bytes(8), 0)
                await until(lambda: "failed; going on" in caplog.text)
                if broken != "mend":
                    await until(lambda: "the page was damaged" in caplog.text)
            await until(lambda: "the page was damaged" in caplog.text)
            stage.host.dead.add(stage.engine("rollout").writer)
            await until(lambda: node.restarts["rollout"] == 1 and node.ready)

    play(scene())


def test_orders_go_on_after_a_page_that_could_not_be_written(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with stage.node() as node:
            fails = iter(range(3))
            publish = node.page.publish

            def broken(*what: Any) -> None:
                if next(fails, None) is not None:
                    raise OSError(errno.EIO, "Input/output error")
                publish(*what)

            monkeypatch.setattr(node.page, "publish", broken)
            os.pwrite(node.page._fd, bytes(100), SECTION["node"])
            await until(lambda: node.page.node() is not None)
            assert caplog.text.count("cannot write the page") == 3

    play(scene())
