"""New weights over HTTP into the rollout engine of a node, while requests go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from rose import models
from rose.transfer import Publisher
from rose.transfer.errors import TransferError
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Server
from rose.transfer.vllm.client import EngineClient, Updated


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """A job with the rollout engine's own weights as version 0."""
    weights = load_file(next(models.resolve("tiny-b").glob("*.safetensors")))
    files = FileStore(tmp_path / "store", "job")
    publisher = Publisher(files, wire="float32")
    publisher.publish(weights)
    server = Server(lambda job: files)
    yield publisher, weights, f"tcp://127.0.0.1:{server.address[1]}"
    server.close()


def drive(url: str, act: Any) -> Any:
    async def go() -> Any:
        async with aiohttp.ClientSession() as session:
            return await act(EngineClient(session, url))

    return asyncio.run(go())


def test_rollouts_go_on_through_an_update(
    active_node: Any, start_rollouts: Any, complete: Any, trainer: Any, tmp_path: Path
) -> None:
    node, (publisher, weights, store) = active_node, trainer
    url = node.rollout_url
    (before,) = complete(url, "tiny-b", [[9, 8, 7, 6]], 24)
    drive(url, lambda engine: engine.init(store, "job", str(tmp_path / "copy")))
    changed = {name: value + 0.05 * torch.randn(value.shape) for name, value in weights.items()}
    publisher.publish(changed)
    going = start_rollouts(url, in_flight=4, trajectories=8, turns=1)
    try:
        updated: Updated = drive(url, lambda engine: engine.update(1))
        assert updated.version == 1
        assert drive(url, lambda engine: engine.version()) == "1"
        (after,) = complete(url, "tiny-b", [[9, 8, 7, 6]], 24)
        assert after.tokens != before.tokens
    finally:
        going.abandon()
        publisher.publish(weights)
        drive(url, lambda engine: engine.update(2))
    (again,) = complete(url, "tiny-b", [[9, 8, 7, 6]], 24)
    assert again.tokens == before.tokens


def test_a_version_that_never_comes_changes_nothing(
    active_node: Any, complete: Any, trainer: Any, tmp_path: Path
) -> None:
    url = active_node.rollout_url
    drive(url, lambda engine: engine.init(trainer[2], "job", str(tmp_path / "copy")))
    with pytest.raises(TransferError, match="version 7 is not staged: it did not come"):
        drive(url, lambda engine: engine.update(7, wait_s=2.0))
    drive(url, lambda engine: engine.update(0))
    (answer,) = complete(url, "tiny-b", [[9, 8, 7, 6]], 8)
    assert len(answer.tokens) == 8
