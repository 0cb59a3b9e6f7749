"""Growing changes sizes and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rose.models import make_grown, make_tiny


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "a")


def test_a_grown_model_says_the_same(small: Path, tmp_path: Path) -> None:
    folder = make_grown(tmp_path / "big", small, hidden=512, layers=5, intermediate=900)
    before, after = load(small), load(folder)
    assert after.config.num_hidden_layers == 5
    assert sum(w.numel() for w in after.parameters()) > 8 * sum(
        w.numel() for w in before.parameters()
    )
    tokens = torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(before(tokens).logits, after(tokens).logits, atol=2e-4)
    assert (folder / "tokenizer.json").exists()


def test_what_was_added_can_be_learned(small: Path, tmp_path: Path) -> None:
    model = load(make_grown(tmp_path / "big", small, hidden=256, layers=3, intermediate=300))
    model(torch.tensor([[5, 6, 7]])).logits[0, -1, 9].backward()
    assert model.model.layers[2].mlp.down_proj.weight.grad.abs().max() > 0
    assert model.model.layers[0].self_attn.o_proj.weight.grad[:, 128:].abs().max() > 0


def test_sizes_that_do_not_hold_it_are_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden must be a multiple of 128"):
        make_grown(tmp_path / "big", small, hidden=200, layers=5, intermediate=900)
