"""New weights in real engines: exactly those, on all ranks, and from the host's copy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rose.models import make_tiny
from rose.transfer import Publisher
from rose.transfer.manifest import digest
from rose.transfer.store.files import FileStore

pytestmark = pytest.mark.engine


@dataclass
class Brought:
    """An engine that was brought from `base` to the newest version, and a fresh one with that."""

    folder: Path
    newest: dict[str, torch.Tensor]

    def run(self, models_: tuple[str, ...], ranks: int, layers: str) -> None:
        engines = [run_engine(self.folder, model, ranks, layers) for model in models_]
        for engine in engines:
            _, said = engine.communicate(timeout=300)
            assert engine.returncode == 0, said[-3000:]

    def said(self, model: str) -> Any:
        return json.loads((self.folder / f"{model}.json").read_text())


@pytest.fixture(scope="module")
def bring(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], Brought]:
    @cache
    def both(kind: str, ranks: int, layers: str) -> Brought:
        folder = tmp_path_factory.mktemp("weights")
        brought = Brought(folder, make_three_versions(folder, tied=kind == "tied"))
        brought.run(("base", "newest"), ranks, layers)
        return brought

    return both


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
    bring: Callable[[str, int, str], Brought], kind: str, ranks: int, layers: str
) -> None:
    brought = bring(kind, ranks, layers)
    base, fresh = brought.said("base"), brought.said("newest")
    assert base["after"] == fresh["before"]
    assert base["after"] != base["before"]
    assert base["in place"]
    check_digests(base["digests"], brought.newest)


def test_a_restarted_engine_comes_back_from_the_hosts_copy(
    bring: Callable[[str, int, str], Brought],
) -> None:
    """Its store is out of reach."""
    brought = bring("tied", 1, "stock")
    brought.run(("again",), 1, "stock")
    base, again = brought.said("base"), brought.said("again")
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
