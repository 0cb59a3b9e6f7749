"""Files that belong to one process at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


def claim(path: Path) -> IO[str]:
    """Held until the file is closed, or the process is gone; BlockingIOError: another has it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file
