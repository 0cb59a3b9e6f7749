"""When does a scheduler answer, and when do so many turns run again?

Asked from a process of its own: one that also plays thousands of clients which come back would
mostly measure itself.

    python -m rose.bench.probe URL TURNS       waits for a line, prints both monotonic times
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable

AGAIN_S = 0.02


def main(url: str, turns: int) -> None:
    sys.stdin.readline()
    answers = _when(f"{url}/health", lambda _: True)
    resumed = _when(f"{url}/rose/v1/status", lambda said: _running(said) >= turns)
    print(json.dumps({"answers": answers, "resumed": resumed}), flush=True)


def _when(url: str, enough: Callable[[bytes], bool]) -> float:
    while True:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                if enough(answer.read()):
                    return time.monotonic()
        except OSError:
            pass  # not yet
        time.sleep(AGAIN_S)


def _running(said: bytes) -> int:
    return sum(job["running"] for job in json.loads(said)["jobs"].values())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
