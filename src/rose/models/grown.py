"""A model made larger without changing a word of what it says.

Benchmarks need a policy that costs what a real one does and still learns within minutes. Wider
states, more heads, wider layers and more of them are added so that they contribute exactly nothing
at first: what leads out of them is zero. Training may use them from its first step on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose.models.folder import build, is_complete


def make_grown(path: Path, source: Path, *, hidden: int, layers: int, intermediate: int) -> Path:
    """`source`'s Llama with these sizes at `path`, unless a complete model is already there."""
    if is_complete(path):
        return path
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        grown = _grow(small, hidden, layers, intermediate)
    with build(path) as folder:
        grown.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return path


def _grow(small: Any, hidden: int, layers: int, intermediate: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    old = small.config
    times = hidden // old.hidden_size
    if (
        hidden % old.hidden_size
        or layers < old.num_hidden_layers
        or (intermediate < old.intermediate_size)
    ):
        raise ValueError(
            f"hidden must be a multiple of {old.hidden_size}, layers at least "
            f"{old.num_hidden_layers}, intermediate at least {old.intermediate_size}"
        )
    settings = old.to_dict() | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": times * old.num_attention_heads,
        "num_key_value_heads": times * old.num_key_value_heads,
        "head_dim": old.head_dim,
        # States have zeros beside the old ones, so their mean square is smaller, and so is this.
        "rms_norm_eps": old.rms_norm_eps / times,
        "initializer_range": 0.02,
    }
    grown = LlamaForCausalLM(LlamaConfig(**settings)).float()
    norm = times**-0.5
    for layer in grown.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    for new, before in zip(grown.model.layers, small.model.layers, strict=False):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _put(getattr(new.self_attn, name), getattr(before.self_attn, name))
        for name in ("gate_proj", "up_proj", "down_proj"):
            _put(getattr(new.mlp, name), getattr(before.mlp, name))
        for name in ("input_layernorm", "post_attention_layernorm"):
            _scale(getattr(new, name), getattr(before, name), norm)
    _scale(grown.model.norm, small.model.norm, norm)
    for new, before in (
        (grown.model.embed_tokens, small.model.embed_tokens),
        (grown.lm_head, small.lm_head),
    ):
        new.weight.zero_()
        _put(new, before)
    return grown


def _put(new: Any, before: Any) -> None:
    rows, columns = before.weight.shape
    new.weight[:rows, :columns] = before.weight


def _scale(new: Any, before: Any, factor: float) -> None:
    new.weight[: before.weight.shape[0]] = before.weight * factor
