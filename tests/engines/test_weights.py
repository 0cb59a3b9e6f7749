"""New weights in running engines: exactly those, at once on all ranks, while requests go on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from rose import models
from rose.models import make_tiny
from rose.transfer import Publisher
from rose.transfer.copy import TransferError
from rose.transfer.manifest import digest
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Server
from rose.transfer.vllm.client import EngineClient, Updated


@pytest.mark.parametrize(
    ("kind", "ranks", "layers"),
    [
        ("tied", 1, "stock"),
        ("untied", 1, "stock"),
        ("tied", 1, "unpacked"),
        ("tied", 2, "stock"),
        ("untied", 2, "unpacked"),
    ],
)
def test_an_updated_engine_answers_like_a_fresh_one(
    tmp_path: Path, kind: str, ranks: int, layers: str
) -> None:
    newest = make_three_versions(tmp_path, tied=kind == "tied")
    both = [run_engine(tmp_path, model, ranks, layers) for model in ("base", "newest")]
    for engine in both:
        _, said = engine.communicate(timeout=300)
        assert engine.returncode == 0, said[-3000:]
    base, fresh = (json.loads((tmp_path / f"{m}.json").read_text()) for m in ("base", "newest"))
    assert base["after"] == fresh["before"]
    assert base["after"] != base["before"]
    assert base["in place"]
    check_digests(base["digests"], newest)


def test_a_restarted_engine_comes_back_from_the_hosts_copy(tmp_path: Path) -> None:
    """Its store is out of reach."""
    make_three_versions(tmp_path, tied=True)
    for model in ("base", "again"):
        engine = run_engine(tmp_path, model, 1, "stock")
        _, said = engine.communicate(timeout=300)
        assert engine.returncode == 0, said[-3000:]
    base, again = (json.loads((tmp_path / f"{m}.json").read_text()) for m in ("base", "again"))
    assert again["before"] == base["before"] != base["after"]
    assert again["after"] == base["after"]


def make_three_versions(folder: Path, *, tied: bool) -> dict[str, torch.Tensor]:
    """Of a tiny model: `base`, then one that is published too, then `newest`, which is not yet."""
    models_ = [make_tiny(folder / name, tied=tied, seed=11) for name in ("base", "newest")]
    files = [model / "model.safetensors" for model in models_]
    weights = {name: value.bfloat16().float() for name, value in load_file(files[0]).items()}
    save_file(weights, files[0], {"format": "pt"})
    publisher = Publisher(FileStore(folder / "store", "job"))
    torch.manual_seed(3)
    for version in range(2):
        publisher.publish(weights, version)
        for value in weights.values():
            mask = torch.rand(value.shape) < 0.02
            value[mask] = (value[mask] + 0.3).bfloat16().float()
    save_file(weights, files[1], {"format": "pt"})
    return weights


def run_engine(folder: Path, model: str, ranks: int, layers: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("updated.py")
    words = [sys.executable, str(script), str(folder), model, str(ranks), layers]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def check_digests(ranks: list[Any], weights: dict[str, torch.Tensor]) -> None:
    """Every slice that a rank holds is that of the weights, bit for bit; together they hold all."""
    held = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in weights.items()}
    for rank in ranks:
        for name, box, found in rank:
            index = tuple(slice(*ends) for ends in box)
            part = weights[name][index].bfloat16().contiguous().view(torch.int16)
            assert digest(part.numpy()).hex() == found, f"{name} {box}"
            held[name][index] = True
    missing = [name for name, there in held.items() if not there.all() and name != "lm_head.weight"]
    assert not missing


# ---- over HTTP, into the rollout engine of a node


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
