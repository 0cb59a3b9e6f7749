"""The picture of a run: serving load, latency against SLO, rollout tokens, KV split, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose.bench.colocated import Run
from rose.executor.slo import Slo

SERVING, ROLLOUT, SLO_COLOUR, FREE = "#2a6fbb", "#d9822b", "#b02a2a", "#d8dde3"
TITLES = {
    "serving_alone": "serving alone",
    "share_all": "share-all (no gate)",
    "rose": "rose",
    "rose_gate": "rose, no sub-step preemption",
}


def draw(runs: list[Run], slo: Slo, kv_total: int, title: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure(runs, slo, kv_total, title).savefig(path, dpi=110)


def figure(runs: list[Run], slo: Slo, kv_total: int, title: str) -> Any:
    """One column per run, one row per quantity; shared axes, so columns compare by eye."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.2 * len(runs), 11))
    axes = picture.subplots(5, len(runs), sharex=True, sharey="row", squeeze=False)
    for column, run in enumerate(runs):
        cells = axes[:, column]
        cells[0].set_title(TITLES.get(run.mode, run.mode), fontsize=12)
        _load(cells[0], run)
        _latency(cells[1], run, slo.ttft_s, "ttft_s")
        _latency(cells[2], run, slo.tpot_s, "tpot_s")
        _tokens(cells[3], run)
        _split(cells[4], run, kv_total)
        cells[4].set_xlabel("seconds")
    axes[4][0].legend(loc="lower left", fontsize=8)
    names = ("serving requests", "TTFT, ms", "TPOT, ms", "rollout tokens/s", "KV memory, MiB")
    for row, name in enumerate(names):
        axes[row][0].set_ylabel(name)
        axes[row][0].set_ylim(bottom=0)  # last, because it ends the scaling to what is drawn
    for cell in axes.flat:
        cell.grid(alpha=0.25)
        cell.spines[["top", "right"]].set_visible(False)
    picture.suptitle(title, fontsize=13)
    picture.tight_layout()
    return picture


def _load(cell: Any, run: Run) -> None:
    at = [m.at_s for m in run.moments]
    cell.fill_between(
        at, [m.serving.running + m.serving.waiting for m in run.moments], step="post",
        color=SERVING, alpha=0.7,
    )  # fmt: skip


def _latency(cell: Any, run: Run, limit: float, name: str) -> None:
    points = [(s.scheduled_s, getattr(s, name)) for s in run.samples]
    kept = [(t, v * 1e3) for t, v in points if v is not None]
    late = [v > limit * 1e3 for _, v in kept]
    cell.scatter(
        [t for t, _ in kept], [v for _, v in kept], s=12,
        c=[SLO_COLOUR if bad else SERVING for bad in late],
    )  # fmt: skip
    cell.axhline(limit * 1e3, color=SLO_COLOUR, linestyle="--", linewidth=1)
    cell.annotate(
        "SLO", (0.995, limit * 1e3), xycoords=("axes fraction", "data"), ha="right", va="bottom",
        color=SLO_COLOUR, fontsize=9,
    )  # fmt: skip


def _tokens(cell: Any, run: Run) -> None:
    if run.rollout is None:
        cell.text(0.5, 0.5, "no rollouts", transform=cell.transAxes, ha="center", color="grey")
        return
    offset = run.began - run.rollout.started
    bins = [0] * (int(run.seconds) + 1)
    for at, tokens in run.rollout.arrivals:
        if 0 <= at - offset < run.seconds:
            bins[int(at - offset)] += tokens
    cell.bar(range(len(bins)), bins, width=1.0, align="edge", color=ROLLOUT)


def _split(cell: Any, run: Run, kv_total: int) -> None:
    at = [m.at_s for m in run.moments]
    mib = 1 << 20
    cell.stackplot(
        at,
        [m.rollout.kv_used / mib for m in run.moments],
        [max(0, m.rollout.kv_claim - m.rollout.kv_used) / mib for m in run.moments],
        [max(0, kv_total - m.rollout.kv_claim - m.serving.kv_used) / mib for m in run.moments],
        [m.serving.kv_used / mib for m in run.moments],
        colors=[ROLLOUT, "#f3d3b0", FREE, SERVING],
        labels=["rollout, in use", "rollout, claimed", "free for serving", "serving, in use"],
    )
