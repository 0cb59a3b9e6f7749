"""New weights in real engines: exactly those, on all ranks, and from the host's copy alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
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


CASES = {1: ("tied-stock", "untied-stock", "tied-unpacked"), 2: ("tied-stock", "untied-unpacked")}
"""By number of ranks: whether the model ties its embeddings, and how layers keep their weights."""


@dataclass
class Brought:
    """An engine that was brought from `base` to the newest version, and a fresh one with that."""

    folder: Path
    newest: dict[str, torch.Tensor]

    def said(self, model: str) -> Any:
        return json.loads((self.folder / f"{model}.json").read_text())


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Brought]:
    """By number of ranks and case."""
    made, engines = {}, []
    for ranks, cases in CASES.items():
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        for case in cases:
            newest = make_three_versions(folder / case, tied=not case.startswith("untied"))
            made[ranks, case] = Brought(folder / case, newest)
        engines.append(start(folder, ranks, cases))
    for engine in engines:
        finish(engine)
    return made


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks, cases in CASES.items() for case in cases]
)
def test_an_updated_engine_answers_like_a_fresh_one(
    brought: dict[tuple[int, str], Brought], ranks: int, case: str
) -> None:
    base, fresh = (brought[ranks, case].said(model) for model in ("base", "newest"))
    assert base["after"] == fresh["before"]
    assert base["after"] != base["before"]
    assert base["in place"]
    check_digests(base["digests"], brought[ranks, case].newest)


@pytest.mark.parametrize("ranks", CASES)
def test_a_restarted_engine_comes_back_from_the_hosts_copy(
    brought: dict[tuple[int, str], Brought], ranks: int
) -> None:
    """Its store is out of reach."""
    base, again = (brought[ranks, CASES[ranks][0]].said(model) for model in ("base", "again"))
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


def start(folder: Path, ranks: int, cases: tuple[str, ...]) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("updated.py")
    words = [sys.executable, str(script), str(folder), str(ranks), *cases]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(engine: subprocess.Popen[str]) -> None:
    try:
        _, said = engine.communicate(timeout=300)
    finally:
        engine.kill()
    assert engine.returncode == 0, said[-3000:]


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
