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
    "broken_promises": ("<=", 0.0, 0.0),
    "revoke_s_worst_fault": ("<=", 5.0, 5.0),
    "revoke_beyond_step_ms": ("<=", 50.0, 50.0),
    "grants_unseen": ("<=", 0.0, 0.0),
    "memory_back_s_worst": ("<=", 3.0, 3.0),
    "wire_percent_at_1pct": ("<=", 1.3, 2.1),
    "encode_vs_memcpy": (">=", 0.6, 0.35),
    "apply_vs_memcpy": (">=", 3.0, 1.5),
    "sync_speedup_vs_dense": (">=", 40.0, 15.0),
    "pause_ms": ("<=", 50.0, 250.0),
    "bit_exact": (">=", 1.0, 1.0),
    "wan_copies_per_cluster": ("<=", 1.0, 1.0),
    "throughput_while_fetching": (">=", 1.0, 0.95),
    "overhead_ms_p50": ("<=", 1.5, 4.0),
    "overhead_ms_p99": ("<=", 8.0, 25.0),
    "turns_per_s": (">=", 400.0, 400.0),
    "idle_trajectory_kb": ("<=", 20.0, 20.0),
    "restart_s": ("<=", 3.0, 3.0),
    "makespan_vs_round_robin": ("<=", 0.8, 0.8),
    "makespan_vs_sticky": ("<=", 0.95, 0.95),
    "prefix_hit_points_behind_sticky": ("<=", 0.0, 5.0),
    "throughput_vs_static": (">=", 1.6, 1.3),
    "throughput_vs_static_dapo": (">=", 1.8, 1.4),
    "throughput_vs_elastic": (">=", 1.2, 1.2),
    "throughput_vs_elastic_dapo": (">=", 1.2, 1.2),
    "allocation_overhead": ("<=", 0.01, 0.01),
    "lost_turns": ("<=", 0.0, 0.0),
    "duplicated_turns": ("<=", 0.0, 0.0),
    "token_exact": (">=", 1.0, 1.0),
}
"""Direction, goal and bar of each ratio that has one."""


def table(result: dict[str, Any], console: Console) -> None:
    title = "ratios"
    for name, part in result["modes"].items():
        if isinstance(part, dict) and "modes" in part:
            title = "ratios (worst scenario)"
            _scenario(name, part, console)
    shown = Table(title=title, title_justify="left")
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
        "p99 vs alone",
        "SLO met",
        "prefix hits",
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
            _against(row["ttft_p99_vs_alone"]) + " / " + _against(row["tpot_p99_vs_alone"]),
            f"{row['slo_attainment']:.2%}" if served else "-",
            f"{row['prefix_hit_rate']:.0%}" if row["prefix_hit_rate"] else "-",
            f"{row['rollout_tok_s']['median']:.1f}" if rolled else "-",
            f"{row['harvest_efficiency']:.2f}" if rolled and served else "-",
        )
        for kind, one in row["kinds"].items():
            shown.add_row(
                f"  {kind}",
                str(one["requests"]),
                _pair(one["ttft_s"]),
                _pair(one["tpot_s"]),
                _against(one["ttft_p99_vs_alone"]) + " / " + _against(one["tpot_p99_vs_alone"]),
            )
    console.print(shown)
    if disturbed := sum(row["disturbed"] for row in part["modes"].values()):
        console.print(f"  latencies without {disturbed} requests while the host took CPU time away")
    few = [m for m, row in part["modes"].items() if row["ttft_s"] and row["requests"] < 100]
    if few:
        console.print(f"  fewer than 100 requests in {', '.join(few)}: their p99 is the worst one")


def _against(found: dict[str, Any] | None) -> str:
    return f"{found['value']:.2f} ({found['low']:.2f}-{found['high']:.2f})" if found else "-"


def _pair(found: dict[str, Any] | None) -> str:
    return f"{found['p50'] * 1e3:.0f} / {found['p99'] * 1e3:.0f}" if found else "-"


def transfer_table(result: dict[str, Any], console: Console) -> None:
    parts = result["modes"]
    shown = _plain("codecs, one thread, ratios to a memcpy of the dense bytes",
                   "changed", "codec", "wire %", "encode", "apply")  # fmt: skip
    for density, part in parts["codecs"].items():
        for name, row in part["codecs"].items():
            shown.add_row(
                f"{float(density):.1%}",
                name,
                f"{row['wire_percent']:.2f}",
                f"{row['encode_vs_memcpy']:.3g}",
                f"{row['apply_vs_memcpy']:.3g}",
            )
    console.print(shown)
    shown = _plain("real RL updates", "step", "reward", "changed", "rose %", "coo %", "xor+zstd %")
    for row in parts["updates"]["steps"]:
        wire = (f"{row['wire_percent'][name]:.3f}" for name in ("rose", "coo", "xor_zstd"))
        density = f"{row['density']:.3%}"
        shown.add_row(str(row["step"]), f"{row['reward_mean']:.3f}", density, *wire)
    console.print(shown)
    shown = _plain("into a running engine, 1 % changed", "Gb/s", "rose s", "dense s", "times",
                   "pause ms", "dense pause ms")  # fmt: skip
    for speed, link in parts["links"].items():
        rose, dense = link["rose"], link["dense"]
        shown.add_row(
            speed,
            f"{rose['total_s']:.3f}",
            f"{dense['total_s']:.2f}",
            f"{link['sync_speedup_vs_dense']:.1f}",
            f"{rose['pause_ms']:.0f}",
            f"{dense['pause_ms']:.0f}",
        )
    console.print(shown)


def e2e_table(result: dict[str, Any], console: Console) -> None:
    for algorithm, part in result["modes"].items():
        slo = part["slo"]
        title = f"{algorithm}: SLO TTFT {slo['ttft_s'] * 1e3:.0f} ms, "
        title += f"TPOT {slo['tpot_s'] * 1e3:.0f} ms"
        shown = _plain(title, "mode", "episodes/s", "sample", "learn", "sync s", "reward",
                       "SLO met", "of", "TTFT", "TPOT", "lent", "host")  # fmt: skip
        for mode, row in part["runs"].items():
            met = row["slo_attainment"]
            shown.add_row(
                mode,
                f"{row['episodes_per_s']['median']:.2f}",
                *(f"{row[name]:.1f}" for name in ("sample_s", "learn_s", "sync_s")),
                f"{row['reward']:.2f}",
                "-" if met is None else f"{met:.1%}",
                str(row["requests"]),
                *(f"{row[name]['p99'] * 1e3:.0f}" if row[name] else "-"
                  for name in ("ttft_s", "tpot_s")),
                f"{row['lent']:.0%}",
                f"{row['host_cores']:.2f}",
            )  # fmt: skip
        console.print(shown)


def _plain(title: str, *columns: str) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in columns:
        shown.add_column(column, justify="right")
    return shown


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, default=str) + "\n")
