from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rose.models import make_tiny
from rose.plan.shapes import SHAPES, ModelShape, from_config, shape

PUBLISHED = {
    "Qwen3-8B": 8.19e9,
    "Qwen3-32B": 32.8e9,
    "Qwen2.5-7B": 7.61e9,
    "Qwen2.5-32B": 32.5e9,
    "Llama-3-70B": 70.6e9,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def written(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name: str) -> None:
    known = SHAPES[name]
    assert known.parameters == pytest.approx(PUBLISHED[name], rel=0.02)
    assert known.weight_bytes() == 2 * known.parameters
    assert known.flops_per_token == 2 * (known.parameters - known.head)


def test_kv_cache_of_a_token() -> None:
    assert SHAPES["Qwen3-8B"].kv_bytes_per_token() == 147_456
    assert SHAPES["Llama-3-70B"].kv_bytes_per_token(1) == 163_840


def test_a_config_gives_the_same_shape(tmp_path: Path) -> None:
    file = written(tmp_path / "Qwen3-8B", QWEN3_8B)
    assert from_config(file) == SHAPES["Qwen3-8B"]
    assert shape(str(file.parent)) == from_config(file.parent) == SHAPES["Qwen3-8B"]


def test_names_in_any_case() -> None:
    assert shape("qwen2.5-7b") is SHAPES["Qwen2.5-7B"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_count_is_that_of_the_real_model(tmp_path: Path, tied: bool) -> None:
    from safetensors import safe_open

    folder = make_tiny(tmp_path / "tiny", tied=tied)
    with safe_open(str(folder / "model.safetensors"), "numpy") as weights:
        count = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    assert from_config(folder).parameters == count
    assert from_config(folder).tied == tied


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    short = {
        key: value
        for key, value in QWEN3_8B.items()
        if key not in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "model_type")
    }
    found = from_config(written(tmp_path / "m", short))
    assert found == ModelShape("m", 36, 4096, 32, 32, 128, 12288, 151936, False)


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
)
def test_a_missing_key_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    file = written(tmp_path, {name: value for name, value in QWEN3_8B.items() if name != key})
    with pytest.raises(ValueError, match=re.escape(f"{file} has no {key}")):
        from_config(file)


def test_what_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size is 'wide', not a number above 0"):
        from_config(written(tmp_path, QWEN3_8B | {"hidden_size": "wide"}))
    with pytest.raises(ValueError, match="has num_experts: models with experts"):
        from_config(written(tmp_path, QWEN3_8B | {"num_experts": 128}))
    with pytest.raises(ValueError, match=r"is not a model's config\.json"):
        from_config(written(tmp_path, [1]))
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        from_config(tmp_path / "nothing" / "config.json")
    with pytest.raises(ValueError, match=r"Model gpt-9 is not known: take one of Qwen3-8B"):
        shape("gpt-9")
