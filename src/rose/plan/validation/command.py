"""`rose plan validate`: what was measured, what is simulated, how far apart."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from rose.bench.stats import Spread
from rose.plan.progress import Say
from rose.plan.validation.compared import THROUGHPUT, Compared, worst
from rose.plan.validation.e2e import e2e
from rose.plan.validation.executor import executor

FOUND = Path("bench-out")
"""Where benchmarks write by default."""
PLAYS = {"executor": executor, "e2e": e2e}


def validate(
    executor_file: Path | None, e2e_file: Path | None, say: Say
) -> tuple[dict[str, Path], list[Compared]]:
    """Against the files that are given, and those that are where benchmarks write."""
    files = {}
    for bench, given in (("executor", executor_file), ("e2e", e2e_file)):
        path = given or FOUND / f"{bench}.json"
        if given is not None or path.exists():
            files[bench] = path
    if not files:
        raise ValueError(
            f"nothing to validate against: {FOUND}/executor.json and {FOUND}/e2e.json are not "
            "there; run `rose bench executor` or `rose bench e2e`, or give --executor or --e2e"
        )
    return files, [row for bench, path in files.items() for row in PLAYS[bench](path, say)]


def shown(files: dict[str, Path], rows: list[Compared]) -> tuple[list[Any], dict[str, Any]]:
    """For people, and as JSON."""
    table = Table("bench", "scenario", "mode", "", "measured", "simulated", "error", "by chance")
    for row in rows:
        table.add_row(row.bench, row.scenario, row.mode, row.key, _range(row, row.measured),
                      _range(row, row.simulated), f"{row.error:.0%}",
                      "" if row.chance is None else f"{row.chance:.0%}")  # fmt: skip
    errors = worst(rows)
    words = ", ".join(f"{key} {value:.3f}" for key, value in errors.items())
    return [table, words], {
        "bench": "plan validate",
        "settings": {bench: str(path) for bench, path in files.items()},
        "modes": [{**asdict(row), "error": row.error} for row in rows],
        "ratios": errors,
    }


def _range(row: Compared, one: Spread) -> str:
    """P99s in ms."""
    shape, by = (".3f", 1.0) if row.key == THROUGHPUT else (".1f", 1e3)
    middle, low, high = (f"{value * by:{shape}}" for value in (one.median, one.low, one.high))
    return middle if low == high else f"{middle} ({low}-{high})"
