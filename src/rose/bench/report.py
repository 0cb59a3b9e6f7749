"""Benchmark results for people: a table, and JSON with the keys of the design."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GOALS: dict[str, tuple[str, float, float]] = {
    "ttft_p99_vs_alone": ("<=", 1.03, 1.10),
    "tpot_p99_vs_alone": ("<=", 1.03, 1.10),
    "slo_attainment": (">=", 1.0, 0.99),
    "harvest_efficiency": (">=", 0.95, 0.80),
    "slo_attainment_gate": (">=", 1.0, 0.99),
    "harvest_efficiency_gate": (">=", 0.90, 0.70),
    "reclaim_beyond_step_ms": ("<=", 0.0, 50.0),
    "revoke_vs_step": ("<=", 1.0, 1.0),
    "activate_s_worst": ("<=", 2.0, 2.0),
    "dormant_cpu_percent": ("<=", 1.0, 1.0),
    "dormant_kv_bytes": ("<=", 0.0, 0.0),
    "scheduler_overhead_us": ("<=", 50.0, 50.0),
}
"""Direction, goal and bar of each ratio that has one."""


def table(result: dict[str, Any], console: Console) -> None:
    for name, part in result["modes"].items():
        if "modes" in part:
            _scenario(name, part, console)
    shown = Table(title="ratios (worst scenario)", title_justify="left")
    for column in ("key", "value", "goal / bar", ""):
        shown.add_column(column, justify="left" if column == "key" else "right")
    for key, value in result["ratios"].items():
        if key in GOALS:
            direction, goal, bar = GOALS[key]
            good = value <= bar if direction == "<=" else value >= bar
            best = value <= goal if direction == "<=" else value >= goal
            verdict = "[green]goal[/]" if best else "[yellow]bar[/]" if good else "[red]missed[/]"
            shown.add_row(key, f"{value:.3g}", f"{direction} {goal:g} / {bar:g}", verdict)
        else:
            shown.add_row(key, f"{value:.3g}", "", "")
    console.print(shown)


def _scenario(name: str, part: dict[str, Any], console: Console) -> None:
    slo = part["slo"]
    shown = Table(
        title=(
            f"{name}: {part['rate']:.2f} req/s, SLO TTFT {slo['ttft_s'] * 1e3:.0f} ms, "
            f"TPOT {slo['tpot_s'] * 1e3:.0f} ms, serving alone leaves {part['idle_alone']:.0%} idle"
        ),
        title_justify="left",
    )
    for column in (
        "mode",
        "requests",
        "TTFT p50/p99 ms",
        "TPOT p50/p99 ms",
        "SLO met",
        "rollout tok/s",
        "harvest",
    ):
        shown.add_column(column, justify="left" if column == "mode" else "right")
    for mode, row in part["modes"].items():
        served = row["ttft_s"] is not None
        rolled = row["rollout_tok_s"]["median"] > 0
        shown.add_row(
            mode,
            str(row["requests"]) if served else "-",
            _pair(row["ttft_s"]),
            _pair(row["tpot_s"]),
            f"{row['slo_attainment']:.2%}" if served else "-",
            f"{row['rollout_tok_s']['median']:.1f}" if rolled else "-",
            f"{row['harvest_efficiency']:.2f}" if rolled and served else "-",
        )
    console.print(shown)
    few = [m for m, row in part["modes"].items() if row["ttft_s"] and row["requests"] < 100]
    if few:
        console.print(f"  fewer than 100 requests in {', '.join(few)}: their p99 is the worst one")


def _pair(found: dict[str, Any] | None) -> str:
    return f"{found['p50'] * 1e3:.0f} / {found['p99'] * 1e3:.0f}" if found else "-"


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, default=str) + "\n")
