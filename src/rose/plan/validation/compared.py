"""What was measured beside what is simulated, and how far apart they are."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench.stats import Spread, median_and_spread, percentiles

PLAYED = 9
"""How often a benchmark is simulated, each time with other chances."""
RESAMPLED = 500
THROUGHPUT, TTFT, TPOT = "throughput", "ttft_p99", "tpot_p99"


@dataclass(frozen=True)
class Compared:
    bench: str
    scenario: str
    mode: str
    key: str
    measured: Spread
    """Its windows or runs beside it, where the benchmark tells them."""
    simulated: Spread
    """The middle of several plays: chance alone makes this much of a difference."""
    chance: float | None = None
    """Of a P99: nine of ten of as many other requests are within this share of it."""

    @property
    def error(self) -> float:
        missed = abs(self.simulated.median - self.measured.median)
        return missed / self.measured.median if self.measured.median else math.inf


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
    bench: str, scenario: str, mode: str, told: dict[str, Any], seen: Sequence[Seen],
    host_s: float = 0.0,
) -> list[Compared]:  # fmt: skip
    """P99s as the benchmark takes them. `told`: what it says of the mode; `seen`: its windows,
    played several times over, of which the middle P99 counts."""
    if not told["ttft_s"]:
        return []
    windows = [one for one in told.get("windows", []) if one["ttft_s"]]
    rows = []
    for key, name, extra in ((TTFT, "ttft", host_s), (TPOT, "tpot", 0.0)):
        p99s = [one[f"{name}_s"]["p99"] for one in windows] or [told[f"{name}_s"]["p99"]]
        measured = Spread(told[f"{name}_s"]["p99"], min(p99s), max(p99s), len(p99s))
        simulated = median_and_spread([p99(getattr(one, name)) + extra for one in seen])
        by_chance = chance(getattr(seen[0], name) + extra, told[f"{name}_s"]["count"])
        rows.append(Compared(bench, scenario, mode, key, measured, simulated, by_chance))
    return rows


def chance(values: np.ndarray, count: int) -> float:
    """How far P99s of `count` requests are from each other, by drawing them from simulated ones:
    half of the range of nine in ten, as a share. A P99 of 300 requests is the third worst."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLED, count))
    p99s = np.quantile(drawn, 0.99, axis=1, method="inverted_cdf")
    low, middle, high = np.quantile(p99s, (0.05, 0.5, 0.95))
    return float((high - low) / 2 / middle)


def pooled(ones: Sequence[Seen]) -> Seen:
    """Windows or runs of one play."""
    ttft, tpot = (np.concatenate([getattr(one, key) for one in ones]) for key in ("ttft", "tpot"))
    return Seen(ttft, tpot, speeds(ones).median)


def speeds(ones: Sequence[Seen]) -> Spread:
    return median_and_spread([one.made_per_s for one in ones])


def scaled(one: Spread, by: float) -> Spread:
    return Spread(one.median * by, one.low * by, one.high * by, one.repeats)


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
