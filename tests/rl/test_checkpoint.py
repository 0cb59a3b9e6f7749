from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rose.rl import checkpoint
from rose.rl.checkpoint import Progress


def parts() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    return model, optimiser


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    model, optimiser = parts()
    checkpoint.save(tmp_path, Progress("abc", 4, 10), model, optimiser)
    fresh = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    progress = checkpoint.load(tmp_path, fresh, other)
    assert (progress.run, progress.step, progress.version) == ("abc", 4, 14)
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(
        other.state_dict()["state"][0]["exp_avg"], optimiser.state_dict()["state"][0]["exp_avg"]
    )


def test_a_new_folder_is_a_new_run(tmp_path: Path) -> None:
    model, optimiser = parts()
    first, second = (checkpoint.load(tmp_path, model, optimiser) for _ in range(2))
    assert first.step == 0
    assert first.run != second.run


def test_a_save_that_fails_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimiser = parts()
    checkpoint.save(tmp_path, Progress("abc", 1, 0), model, optimiser)
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, Progress("abc", 2, 0), model, optimiser)
    monkeypatch.undo()
    assert checkpoint.load(tmp_path, model, optimiser).step == 1
