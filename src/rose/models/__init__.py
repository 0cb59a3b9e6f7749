"""Models that work offline, by name, and folders of any other model."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rose.models.folder import is_complete
from rose.models.smollm2 import make_smollm2
from rose.models.tiny import make_tiny

__all__ = ["MAKERS", "default_cache", "make_smollm2", "make_tiny", "resolve"]

MAKERS: dict[str, Callable[[Path], Path]] = {
    "tiny": make_tiny,
    # Differs from tiny in shape and seed, so that mixing the two up cannot go unnoticed.
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
