"""What was measured beside what is simulated, and how far apart they are."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench.stats import percentiles

THROUGHPUT, TTFT, TPOT = "throughput", "ttft_p99", "tpot_p99"


@dataclass(frozen=True)
class Compared:
    bench: str
    scenario: str
    mode: str
    key: str
    measured: float
    simulated: float
    low: float
    """The lowest and the highest that was measured, window by window or run by run."""
    high: float

    @property
    def error(self) -> float:
        return abs(self.simulated - self.measured) / self.measured


@dataclass(frozen=True)
class Seen:
    """What one simulated window or run gave."""

    ttft: np.ndarray
    tpot: np.ndarray
    made_per_s: float
    """Of rollouts: tokens or episodes."""


def worst(rows: Sequence[Compared]) -> dict[str, float]:
    """The keys of the design."""
    speeds = [row.error for row in rows if row.key == THROUGHPUT]
    tails = [row.error for row in rows if row.key != THROUGHPUT]
    return {
        "throughput_error_max": max(speeds, default=0.0),
        "p99_error_max": max(tails, default=0.0),
    }


def load(path: Path, bench: str) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; run `rose bench {bench}` first") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict) or result.get("bench") != bench:
        raise ValueError(f"{path} is no result of `rose bench {bench}`")
    return result


def checked(path: Path, play: Callable[[], list[Compared]]) -> list[Compared]:
    """What lacks in a file is told by its name."""
    try:
        rows = play()
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} lacks or garbles {error}: measure it again") from error
    if not rows:
        raise ValueError(f"{path} has nothing to compare: measure it again")
    return rows


def tails(
    bench: str, scenario: str, mode: str, told: dict[str, Any], seen: Sequence[Seen], host_s: float
) -> list[Compared]:
    """P99s as the benchmark takes them. `told`: what it says of the mode; `seen`: its windows,
    played several times over, of which the middle P99 counts."""
    if not told["ttft_s"]:
        return []
    windows = [one for one in told.get("windows", []) if one["ttft_s"]]
    rows = []
    for key, name, extra in ((TTFT, "ttft", host_s), (TPOT, "tpot", 0.0)):
        measured = told[f"{name}_s"]["p99"]
        ones = [one[f"{name}_s"]["p99"] for one in windows] or [measured]
        found = statistics.median(p99(getattr(one, name)) for one in seen) + extra
        rows.append(Compared(bench, scenario, mode, key, measured, found, min(ones), max(ones)))
    return rows


def p99(values: np.ndarray) -> float:
    found = percentiles(values.tolist())
    if found is None:
        raise ValueError("no serving request ends in the simulation: is the window too short?")
    return found.p99


def host_seconds(told: dict[str, Any], alone: Sequence[Seen]) -> float:
    """The host's part of a first-token time, HTTP and sockets, which no profile knows: what the
    median of serving alone has beyond the simulated one."""
    simulated = statistics.median(float(np.median(one.ttft)) for one in alone)
    return max(0.0, float(told["ttft_s"]["p50"]) - simulated)
