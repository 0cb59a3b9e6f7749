"""What `rose plan stress` and `rose plan speed` show people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from rose.plan.speed import Rung, exponent
from rose.plan.stress.report import PREEMPT_S, Report
from rose.plan.stress.search import Worst
from rose.plan.stress.trial import Hurt
from rose.plan.systems.rose import ROSE

GUARANTEE = (
    "guaranteed, beside at most one request that admission has not seen: first tokens within "
    "{promise:.0f} ms (the promise less its margin), or at most one granted rollout step later "
    "than alone ({delay:.0f} ms with preemption); of all requests {share:.1%} late in expectation, "
    "if arrivals do not aim"
)


def stress(report: Report) -> list[Any]:
    found = _worst(report.scenario.name, report.worst.values())
    preempted = _worst("with preemption", report.preempted.values())
    others = Table("the same arrivals", "system", "SLO met", "late by it", "TTFT +ms", "TPOT +ms")
    for one in report.worst.values():
        family = one.pattern.family
        for name, hurt in report.rules(one).items():
            others.add_row(
                family if name == ROSE.name else "", name, _met(hurt.late_lent, hurt),
                str(hurt.added_late), f"{hurt.ttft_excess_s * 1e3:.1f}",
                f"{hurt.tpot_excess_s * 1e3:.2f}",
            )  # fmt: skip
    return [found, others, preempted, guarantee(report)]


def _worst(title: str, worst: Iterable[Worst]) -> Table:
    table = Table("worst", "requests", "SLO met alone, lent", "late by it", "TTFT +ms",
                  "if one unseen", "r ms", "TPOT +ms", "held",
                  title=title, title_justify="left")  # fmt: skip
    for one in worst:
        hurt = one.hurt
        table.add_row(
            one.pattern.family, str(hurt.requests),
            f"{_met(hurt.late_alone, hurt)}, {_met(hurt.late_lent, hurt)}", str(hurt.added_late),
            f"{hurt.ttft_excess_s * 1e3:.1f}",
            f"{hurt.single_excess_s * 1e3:.1f}" if hurt.single else "-",
            f"{hurt.step_s * 1e3:.1f}", f"{hurt.tpot_excess_s * 1e3:.2f}", hurt.within,
        )  # fmt: skip
    return table


def guarantee(report: Report) -> str:
    serving = report.scenario.serving
    return GUARANTEE.format(
        promise=(1.0 - serving.slo_margin) * serving.slo.ttft_s * 1e3,
        delay=PREEMPT_S * 1e3,
        share=ROSE.terms.error_budget,
    )


def _met(late: int, hurt: Hurt) -> str:
    return f"{1.0 - late / hurt.requests:.1%}"


def speed(found: dict[str, list[Rung]]) -> list[Any]:
    table = Table("more", "devices", "trajectories", "seconds", "events", "µs per event",
                  "peak MB", "(n log n)^")  # fmt: skip
    for name, rungs in found.items():
        for rung in rungs:
            last = rung is rungs[-1] and len(rungs) > 1
            table.add_row(
                name if rung is rungs[0] else "", f"{rung.devices:,}", f"{rung.trajectories:,}",
                f"{rung.seconds:.1f}", f"{rung.events:,}", f"{rung.us_per_event:.1f}",
                f"{rung.peak_mb:,.0f}", f"{exponent(rungs, name):.2f}" if last else "",
            )  # fmt: skip
    return [table]
