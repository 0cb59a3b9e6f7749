"""Models that work offline, by name, and folders of any other model."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rose.models.folder import is_complete
from rose.models.grown import make_grown
from rose.models.player import make_player
from rose.models.smollm2 import make_smollm2
from rose.models.tiny import make_tiny

__all__ = [
    "MAKERS",
    "default_cache",
    "make_grown",
    "make_player",
    "make_smollm2",
    "make_tiny",
    "resolve",
    "weight_bytes",
]


def _make_grown(path: Path, source: str, **sizes: int) -> Path:
    return make_grown(path, resolve(source, path.parent), **sizes)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "tiny": make_player,
    "tiny-wordy": partial(make_player, wordy=True),
    "small": partial(_make_grown, source="tiny", hidden=512, layers=8, intermediate=1536),
    "medium-wordy": partial(
        _make_grown, source="tiny-wordy", hidden=896, layers=12, intermediate=2688
    ),
    # Random, for tests; of other shapes and seeds, so that mixing them up cannot go unnoticed.
    "tiny-a": make_tiny,
    "tiny-b": partial(make_tiny, hidden=96, kv_heads=1, seed=1),
    "smollm2": make_smollm2,
}


def default_cache() -> Path:
    """$ROSE_HOME/models, or ~/.cache/rose/models."""
    home = os.environ.get("ROSE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "rose") / "models"


def resolve(name_or_path: str, cache: Path | None = None) -> Path:
    """The folder of a model: a known name is made in `cache` on first use, a path must exist."""
    if make := MAKERS.get(name_or_path):
        return make((cache or default_cache()) / name_or_path)
    path = Path(name_or_path).expanduser()
    if not is_complete(path):
        raise ValueError(
            f"{path} is not a model: give a folder with a config.json, "
            f"or one of {', '.join(MAKERS)}."
        )
    return path


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a model's weights once loaded; `auto` computes in float32 (CPU)."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if dtype in ("auto", "float32"):
        config = json.loads((folder / "config.json").read_text())
        if config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16"):
            return 2 * stored
    return stored


def kv_bytes_per_token(folder: Path, element_bytes: int = 4) -> int:
    """KV cache bytes of one token; 4 bytes an element where the engine computes in float32."""
    config = json.loads((folder / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * size * element_bytes)
