"""Charts of a plan and of stress, as SVG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from rose.plan.planner import Plan
from rose.plan.stress.report import Report
from rose.plan.systems import SYSTEMS

COLOURS = {
    "fixed": "#7a7f87", "fixed_async": "#b3b7bd", "spot": "#2a6fbb", "serverless": "#6aa3d8",
    "hybrid": "#3f9a6b", "share_all": "#b3382c", "static_split": "#d98880",
    "rose_published": "#8a5a1a", "rose": "#d9822b", "rose_preemption": "#f0c48f",
}  # fmt: skip
PARTS = (("rollout_s", "rollouts", 1.0), ("train_s", "learning", 0.55), ("sync_s", "weights", 0.25))
"""Of a step, and how dark each is drawn."""


def throughput(plan: Plan) -> str:
    figure, axes = _figure(len(plan.outcomes) * 0.38 + 0.8)
    names = list(plan.outcomes)
    values = [plan.outcomes[n].throughput / plan.fixed.throughput for n in names]
    bars = axes.barh([SYSTEMS[n].says for n in names], values, height=0.65,
                     color=[COLOURS[name] for name in names])  # fmt: skip
    axes.bar_label(bars, [f" {value:.2f}" for value in values])
    axes.invert_yaxis()
    axes.set_xlabel("throughput against the fixed fleet")
    return _svg(figure)


def steps(plan: Plan) -> str:
    """Means of the parts as bars, every step as a dot."""
    figure, axes = _figure(len(plan.outcomes) * 0.38 + 1.0)
    names = list(plan.outcomes)
    left = np.zeros(len(names))
    for part, says, shade in PARTS:
        means = [np.mean([getattr(s, part) for s in plan.outcomes[n].steps]) for n in names]
        axes.barh([SYSTEMS[n].says for n in names], means, left=left, height=0.65, label=says,
                  color="#2a6fbb", alpha=shade)  # fmt: skip
        left += means
    for row, name in enumerate(names):
        each = [step.seconds for step in plan.outcomes[name].steps]
        axes.plot(each, [row] * len(each), "o", color="#1d2329", markersize=4,
                  label="each step" if row == 0 else None)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return _svg(figure)


def ended(plan: Plan) -> str:
    """When trajectories ended: the tail decides when a step does."""
    figure, axes = _figure(3.3)
    for name, one in plan.outcomes.items():
        if len(one.finished):
            times = np.sort(one.finished)
            share = np.arange(1, len(times) + 1) / len(times)
            axes.step(times, share, where="post", color=COLOURS[name], label=SYSTEMS[name].says)
    axes.set_xlabel("seconds after the step began")
    axes.set_ylabel("trajectories ended")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _legend(figure)
    return _svg(figure)


def lent(plan: Plan) -> str:
    figure, axes = _figure(3.3)
    for name, one in plan.outcomes.items():
        if one.lent:
            times, counts = zip(*one.lent, strict=True)
            end = sum(step.seconds for step in one.steps)
            axes.step([*times, end], [*counts, counts[-1]], where="post", label=SYSTEMS[name].says,
                      color=COLOURS[name])  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_ylabel("devices lent")
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)
    _legend(figure)
    return _svg(figure)


def late(report: Report) -> str:
    """Requests that are late through lending, under each rule."""
    worst = list(report.worst.values())
    figure, axes = _figure(len(worst) * 0.55 + 1.0)
    names = list(report.rules(worst[0]))
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        counts = [report.rules(one)[name].added_late for one in worst]
        places = [row + (number - (len(names) - 1) / 2) * height for row in range(len(worst))]
        bars = axes.barh(places, counts, height=height, label=name, color=COLOURS[name])
        axes.bar_label(bars, [f" {count}" if count else "" for count in counts], fontsize=7)
    _families(axes, report)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("requests late through lending")
    _legend(figure)
    return _svg(figure)


def excess(report: Report) -> str:
    """First tokens under rose, beside the bound for requests with one unseen at most."""
    worst = list(report.worst.values())
    figure, axes = _figure(len(worst) * 0.38 + 1.0)
    for number, (what, says, shade) in enumerate(
        (("ttft_excess_s", "of all requests", 0.45),
         ("single_excess_s", "beside at most one unseen request", 1.0))
    ):  # fmt: skip
        axes.barh([row + 0.35 * (number - 0.5) for row in range(len(worst))],
                  [getattr(one.hurt, what) * 1e3 for one in worst], height=0.35, label=says,
                  color=COLOURS["rose"], alpha=shade)  # fmt: skip
    axes.vlines([one.hurt.step_s * 1e3 for one in worst], np.arange(len(worst)) - 0.42,
                np.arange(len(worst)) + 0.42, color="#1d2329", linewidth=2,
                label="r, the longest rollout step granted")  # fmt: skip
    _families(axes, report)
    axes.set_xlabel("ms that first tokens are later than alone, at most")
    _legend(figure)
    return _svg(figure)


def _families(axes: Any, report: Report) -> None:
    axes.set_yticks(range(len(report.worst)), list(report.worst))
    axes.invert_yaxis()


def _legend(figure: Any) -> None:
    """Below the lines, which fill the chart."""
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]
