"""The demo's report: one picture, one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose.bench.arena import Run
from rose.bench.timeline import ROLLOUT, SERVING, SLO_COLOUR
from rose.executor.slo import Slo

NAMES = {"static": "own device only", "rose": "with rose"}
COLOUR = {"static": "#7a7f87", "rose": ROLLOUT}


def draw(facts: dict[str, Any], runs: dict[str, Run], slo: Slo, path: Path) -> None:
    """Reward against steps and against time; serving's latencies against the SLO."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(11, 7.5))
    cells = picture.subplots(2, 2)
    for name, run in runs.items():
        rewards = [row["reward"] for row in run.steps]
        began = run.steps[0]["at"] - run.steps[0]["step_s"]
        look = {"color": COLOUR[name], "label": NAMES[name], "marker": "."}
        cells[0][0].plot([row["step"] for row in run.steps], rewards, **look)
        cells[0][1].plot([row["at"] - began for row in run.steps], rewards, **look)
    for cell, label in ((cells[0][0], "step"), (cells[0][1], "seconds of training")):
        cell.set_xlabel(label)
        cell.set_ylabel("reward")
        cell.set_ylim(0, 1)
        cell.legend(fontsize=9)
    for column, (what, limit) in enumerate((("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s))):
        cell = cells[1][column]
        for number, run in enumerate(runs.values()):
            values = [1e3 * v for s in run.samples if (v := getattr(s, what)) is not None]
            offsets = [number + 0.6 * i / max(1, len(values)) - 0.3 for i in range(len(values))]
            late = [SLO_COLOUR if value > 1e3 * limit else SERVING for value in values]
            cell.scatter(offsets, values, s=10, c=late)
        cell.axhline(1e3 * limit, color=SLO_COLOUR, linestyle="--", linewidth=1)
        cell.set_xticks(range(len(runs)), [NAMES[name] for name in runs])
        cell.set_ylabel(f"serving {what.removesuffix('_s').upper()}, ms")
        cell.set_ylim(bottom=0)
    for cell in cells.flat:
        cell.grid(alpha=0.25)
        cell.spines[["top", "right"]].set_visible(False)
    times = facts["throughput_vs_static"]
    picture.suptitle(f"rose demo: {times:.2f} times the episodes per second")
    picture.tight_layout()
    picture.savefig(path, dpi=110)


def write(facts: dict[str, Any], out: Path) -> Path:
    """One page that needs nothing else but the picture beside it."""
    rows = []
    for label, key, scale, form in (
        ("RL episodes/s", "episodes_per_s", 1.0, ".2f"),
        ("serving TTFT p99, ms", "ttft_p99_s", 1e3, ".0f"),
        ("serving TPOT p99, ms", "tpot_p99_s", 1e3, ".0f"),
        ("SLO met, %", "slo_attainment", 100.0, ".1f"),
        ("weights sent a step, MB", "wire_bytes_a_step", 1e-6, ".2f"),
        ("host, cores", "host_cores", 1.0, ".2f"),
    ):
        pair = facts[key]
        cells = ["-" if pair[n] is None else f"{pair[n] * scale:{form}}" for n in NAMES]
        rows.append(f"| {label} | {' | '.join(cells)} |")
    page = out / "report.md"
    page.write_text(
        "\n".join(
            [
                "# rose demo",
                "",
                f"RL was **{facts['throughput_vs_static']:.2f} times** as fast with the serving "
                "device lent. All numbers are of this run; `demo.json` has them all.",
                "",
                f"| | {' | '.join(NAMES.values())} |",
                "|---|---|---|",
                *rows,
                "",
                "![rewards and latencies](demo.png)",
                "",
            ]
        )
    )
    return page
