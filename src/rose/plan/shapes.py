"""The sizes of a dense decoder, and what follows from them: weights, KV cache, arithmetic.

All models here are of one kind: token embedding, layers of grouped-query attention and a gated MLP
with a norm before each, a last norm, and a head that may be the embedding again (`tied`). Counts
are exact for Llama, Qwen2 (bias on q, k and v) and Qwen3 (norms of q and k).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

BF16 = 2
"""Bytes of an element, of weights and of KV cache."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config.json with several MLPs per layer, of which a token takes some."""


@dataclass(frozen=True)
class ModelShape:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    @cached_property
    def body(self) -> int:
        """Parameters of the layers and the last norm: of all but embedding and head."""
        query, key_value = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + key_value)
        if self.qkv_bias:
            attention += query + key_value
        if self.qk_norm:
            attention += 2 * self.head_dim
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp + 2 * self.hidden) + self.hidden

    @cached_property
    def head(self) -> int:
        """Parameters of the head, as many as of the embedding."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        return self.body + (1 if self.tied else 2) * self.head

    def weight_bytes(self, dtype_bytes: int = BF16) -> int:
        return self.parameters * dtype_bytes

    def read_bytes(self, dtype_bytes: int = BF16) -> int:
        """What every step reads: all weights, of an embedding of its own only some rows."""
        return (self.body + self.head) * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int = BF16) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes

    @property
    def flops_per_token(self) -> int:
        """Of a token with its logits, without attention: a multiply and an add per parameter."""
        return 2 * (self.body + self.head)

    def attention_flops(self, context: float) -> float:
        """Of one token that attends to `context` tokens: scores, and the sum of values."""
        return 4.0 * self.layers * self.heads * self.head_dim * context


SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # From the config.json of each model's page on Hugging Face.
        ModelShape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, False, qk_norm=True),
        ModelShape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, False, qk_norm=True),
        ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, False, qkv_bias=True),
        ModelShape("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, False, qkv_bias=True),
        ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, False),
    )
}


def from_config(path: Path) -> ModelShape:
    """Of a config.json, or of the folder it is in."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a model's config.json.")
    if experts := next((key for key in EXPERTS if config.get(key)), None):
        raise ValueError(f"{file} has {experts}: models with experts cannot be planned yet.")

    def size(key: str, otherwise: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            value = otherwise
        if value is None:
            raise ValueError(f"{file} has no {key}, which a model's size follows from.")
        if not isinstance(value, int) or value <= 0:
            raise ValueError(f"{file}: {key} is {value!r}, not a number above 0.")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kind = config.get("model_type")
    return ModelShape(
        name=file.resolve().parent.name,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        intermediate=size("intermediate_size"),
        vocab=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=kind == "qwen3",
    )


def shape(name_or_folder: str) -> ModelShape:
    """A model of `SHAPES` by its name in any case, or that of a folder with a config.json."""
    for name, known in SHAPES.items():
        if name.casefold() == name_or_folder.casefold():
            return known
    path = Path(name_or_folder).expanduser()
    if not path.exists():
        raise ValueError(
            f"Model {name_or_folder} is not known: take one of {', '.join(SHAPES)}, "
            "or a folder with a config.json."
        )
    return from_config(path)
