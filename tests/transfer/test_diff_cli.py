"""`rose weights diff`: what two checkpoints would cost to send, and checkpoints that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.transfer.test_cli import refused, rose

from rose.transfer.publisher import Publisher
from rose.transfer.store.files import FileStore


def checkpoints(folder: Path) -> tuple[Path, Path, dict[str, Any], dict[str, Any]]:
    """One in a file, one in a folder of two; four elements differ, one of them not in bf16."""
    torch.manual_seed(1)
    old = {
        "up": torch.randn(1000, 700),  # two frames
        "norm": torch.zeros(10, dtype=torch.bfloat16),
        "ids": torch.arange(5),
        "none": torch.zeros(0, 3),
    }
    old["up"][500, 0] = 1.0
    new = {name: value.clone() for name, value in old.items()}
    new["up"][0, 0] += 1.0
    new["up"][999, 699] += 1.0
    new["up"][500, 0] = 1.0000001
    new["norm"][3] = -0.0
    before, after = folder / "old.safetensors", folder / "new"
    after.mkdir()
    save_file(old, before)
    save_file({"up": new["up"]}, after / "model-1.safetensors")
    save_file({n: v for n, v in new.items() if n != "up"}, after / "model-2.safetensors")
    return before, after, old, new


@pytest.mark.parametrize(("sent_as", "width", "of_up"), [("bfloat16", 2, 2), ("float32", 4, 3)])
def test_diff_counts_bits_and_bytes(tmp_path: Path, sent_as: str, width: int, of_up: int) -> None:
    before, after, old, new = checkpoints(tmp_path)
    result = rose("weights", "diff", before, after, "--wire", sent_as, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert {one["name"]: one["changed"] for one in told["tensors"]} == {
        "ids": 0,
        "norm": 1,
        "up": of_up,
    }
    publisher = Publisher(FileStore(tmp_path / "store", "job"), wire=sent_as, threads=1)
    publisher.publish(old)
    sent = publisher.publish(new).stored
    dense = 700_000 * width + 10 * 2 + 5 * 8
    assert told["total"] == {
        "elements": 700_015,
        "changed": of_up + 1,
        "density": (of_up + 1) / 700_015,
        "bytes_dense": dense,
        "bytes_sent": sent,
        "ratio": dense / sent,
        "seconds_dense": dense * 8 / 1e9,
        "seconds_sent": sent * 8 / 1e9,
    }


def test_diff_shows_a_table(tmp_path: Path) -> None:
    before, after, _, _ = checkpoints(tmp_path)
    result = rose("weights", "diff", before, after)
    assert result.exit_code == 0, result.output
    assert "3 of 700,015 elements changed" in result.stdout
    same = rose("weights", "diff", before, before)
    assert "0 bytes instead of 1,400,060\n" in same.stdout


def test_checkpoints_that_cannot_be_compared(tmp_path: Path) -> None:
    def diff(old: dict[str, Any], new: dict[str, Any]) -> str:
        save_file(old, tmp_path / "old.safetensors")
        save_file(new, tmp_path / "new.safetensors")
        return refused(
            "weights", "diff", tmp_path / "old.safetensors", tmp_path / "new.safetensors"
        )

    both, one = {"x": torch.zeros(2, 3)}, torch.zeros(1)
    assert "y is only in OLD" in diff(both | {"y": one}, both)
    assert "y is only in NEW" in diff(both, both | {"y": one})
    assert "x is (2, 3) in OLD and (3, 2) in NEW" in diff(both, {"x": torch.zeros(3, 2)})
    assert "x would be sent as bfloat16" in diff(both, {"x": torch.zeros(2, 3, dtype=torch.int32)})
    assert "x is of complex64" in diff(*[{"x": torch.zeros(2, dtype=torch.complex64)}] * 2)
    assert "and 3 more" in diff(both, both | {f"y{i}": one.clone() for i in range(8)})


def test_checkpoints_that_are_none(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file({"x": torch.zeros(1)}, good)
    bad.write_bytes(b"not a checkpoint")
    (tmp_path / "empty").mkdir()
    for path in (bad, tmp_path / "empty", tmp_path / "missing"):
        assert str(path) in refused("weights", "diff", good, path)
        assert str(path) in refused("weights", "diff", path, good)
    assert "--wire 'int8'" in refused("weights", "diff", good, good, "--wire", "int8")
