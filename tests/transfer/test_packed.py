"""Packed layers of the vLLM that is installed: found, changed in place, and told from others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHAPES = [(1, 1), (3, 5), (64, 16), (100, 70), (576, 1536), (960, 576)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a process of its own found: importing vLLM takes long and changes the process."""
    file = tmp_path_factory.mktemp("packed") / "found.json"
    script = Path(__file__).with_name("packing.py")
    words = [sys.executable, str(script), str(file), json.dumps(SHAPES)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_layer_is_found_and_changed(found: Any, shape: tuple[int, int]) -> None:
    assert found[str(list(shape))] == {"found": True, "multiplies with": "what was written"}


def test_another_weight_is_not_taken_for_it(found: Any) -> None:
    assert found["another weight"] is None


def test_other_kernels_have_no_packed_layer(found: Any) -> None:
    assert found["plain kernel"] is None
    assert found["a handler that is none"] is None
    assert found["memory that ends too soon"] is False
