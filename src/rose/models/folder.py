"""Model folders that are either complete or absent."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_complete(path: Path) -> bool:
    """True if `path` holds a model; `build` is what lets config.json stand for all its files."""
    return (path / "config.json").is_file()


@contextmanager
def build(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that becomes `path` when the block succeeds.

    Two processes may build the same folder at once: the first one wins, the other's is dropped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield staging
        staging.chmod(0o755)
        try:
            staging.rename(path)
        except OSError:
            if not is_complete(path):
                raise FileExistsError(
                    f"{path} is not an empty folder and holds no model: "
                    "remove it or choose another folder."
                ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
