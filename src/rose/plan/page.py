"""A plan, or what stress found, as one HTML page: the answer first, then tables and charts.

A page needs nothing but itself.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from statistics import median

from rose.plan import charts, tables
from rose.plan.outcome import StepTime
from rose.plan.planner import Plan
from rose.plan.stress.report import Report
from rose.plan.stress.search import Worst
from rose.plan.stress.trial import Hurt
from rose.plan.systems import SYSTEMS
from rose.plan.systems.rose import ROSE

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1d2329; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #dfe3e8 }
th:first-child, td:first-child { text-align: left } th { color: #5a636d; font-weight: 600 }
.answer { background: #eef6f0; border-left: 4px solid #2a7f4f; padding: .8rem 1rem }
.unsafe { background: #fbeeee; border-color: #b3382c } .late { color: #b3382c; font-weight: 600 }
svg { max-width: 100%; height: auto } p.note { color: #5a636d }
"""
KEPT = 0.99


def page(plan: Plan) -> str:
    answer = plan.answer
    assert answer is not None
    safe = "answer" if answer.safe else "answer unsafe"
    parts = [
        f"<h1>{html.escape(plan.scenario.name)}</h1>",
        f'<p class="{safe}">Borrow at most <b>{answer.max_borrowed}</b> devices with a headroom of '
        f"<b>{answer.headroom:.0%}</b>: {html.escape(answer.why)}.</p>",
        "<h2>Systems, side by side on the same arrivals</h2>",
        _systems(plan),
        *(f'<p class="late">{html.escape(warning)}.</p>' for warning in plan.warnings),
        charts.throughput(plan),
        "<h2>How long a step takes</h2>",
        charts.steps(plan),
        _table(
            ["seconds", "shortest", "median", "longest", "batches sampled, fewest", "most"],
            [_spread(SYSTEMS[name].says, one.steps) for name, one in plan.outcomes.items()],
        ),
        charts.ended(plan),
        "<h2>Devices lent over time</h2>",
        charts.lent(plan),
        "<h2>How many devices</h2>",
        _table(
            ["at most", "throughput vs fixed", "SLO met"],
            [[str(n), f"{o.throughput / plan.fixed.throughput:.2f}", _met(o.attainment)]
             for n, o in plan.borrowed.items()],
        ),
        "<h2>How much headroom</h2>",
        _table(
            ["of memory", "throughput vs fixed", "SLO met", "turns cut"],
            [[f"{share:.0%}", f"{o.throughput / plan.fixed.throughput:.2f}", _met(o.attainment),
              f"{o.cuts:,}"] for share, o in plan.headrooms.items()],
        ),
        "<h2>What if</h2>",
        _table(
            ["", "throughput vs fixed", "SLO met", "P99 TTFT ms", "P99 TPOT ms"],
            [[name, f"{row['throughput_vs_fixed']:.2f}", _met(row["slo_attainment"]),
              f"{row['ttft_p99_s'] * 1e3:.0f}", f"{row['tpot_p99_s'] * 1e3:.1f}"]
             for name, row in plan.sensitivity.items()],
        ),
        "<h2>Money, US dollars</h2>",
        _table(
            ["", "step, dedicated", "opportunistic", "serving", "correct answer, dedicated",
             "opportunistic", "serving"],
            [[SYSTEMS[name].says, *(f"{row[key]:.3g}" for key in _LINES)]
             for name, row in plan.money.items()],
        ),
        "<p>What a step costs on the opportunistic line:</p>",
        _table(
            ["", *next(iter(plan.parts.values()))],
            [[SYSTEMS[name].says, *(f"{cost:.3g}" for cost in parts.values())]
             for name, parts in plan.parts.items()],
        ),
        '<p class="note">Prices and what each line contains: docs/plan.md. All numbers here are '
        "simulated.</p>",
    ]  # fmt: skip
    return _whole(plan.scenario.name, parts)


def stress(report: Report) -> str:
    held = report.held
    parts = [
        f"<h1>Stress: {html.escape(report.scenario.name)}</h1>",
        f'<p class="{"answer" if held else "answer unsafe"}">'
        f"<b>{'Kept' if held else 'BROKEN'}</b> in {report.tries:,} tries, what is "
        f"{html.escape(tables.guarantee(report))}.</p>",
        "<h2>The worst arrivals of each family</h2>",
        charts.late(report),
        charts.excess(report),
        _worst(report.worst.values()),
        '<p class="note"><i>r</i> is the longest rollout step that was granted. Excess is over '
        "serving alone on the same arrivals, of the request that has most of it; more than "
        "<i>r</i> is slack that was lent to a request in time, or several unseen.</p>",
        "<h2>The same arrivals under other rules</h2>",
        _table(
            ["", "", "SLO met", "late by it", "TTFT +ms", "TPOT +ms"],
            [[one.pattern.family if name == ROSE.name else "", name,
              _met(1.0 - hurt.late_lent / hurt.requests), str(hurt.added_late),
              f"{hurt.ttft_excess_s * 1e3:.1f}", f"{hurt.tpot_excess_s * 1e3:.1f}"]
             for one in report.worst.values() for name, hurt in report.rules(one).items()],
        ),
        "<h2>With preemption: the worst arrivals then</h2>",
        _worst(report.preempted.values()),
        '<p class="note">What is guaranteed, and what the families are: docs/plan.md. All numbers '
        "here are simulated.</p>",
    ]  # fmt: skip
    return _whole(f"Stress: {report.scenario.name}", parts)


def _worst(worst: Iterable[Worst]) -> str:
    return _table(
        ["", "requests", "SLO met alone", "lent", "late by it", "TTFT +ms", "if one unseen",
         "<i>r</i> ms", "TPOT +ms", "within"],
        [[one.pattern.family, *_hurt(one.hurt)] for one in worst],
    )  # fmt: skip


def _hurt(hurt: Hurt) -> list[str]:
    return [
        str(hurt.requests),
        _met(1.0 - hurt.late_alone / hurt.requests),
        _met(1.0 - hurt.late_lent / hurt.requests),
        str(hurt.added_late),
        f"{hurt.ttft_excess_s * 1e3:.1f}",
        f"{hurt.single_excess_s * 1e3:.1f}" if hurt.single else "-",
        f"{hurt.step_s * 1e3:.1f}",
        f"{hurt.tpot_excess_s * 1e3:.1f}",
        hurt.within,
    ]


def _whole(title: str, parts: list[str]) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


_LINES = tuple(
    f"{what}_{line}"
    for what in ("step", "correct")
    for line in ("dedicated", "opportunistic", "serving")
)


def _systems(plan: Plan) -> str:
    rows = []
    for name, one in plan.outcomes.items():
        serving = one.attainment is not None
        rows.append([
            SYSTEMS[name].says,
            f"{one.throughput / plan.fixed.throughput:.2f}",
            f"{one.rollout_s:.0f}",
            _met(one.attainment) if serving else "-",
            f"{one.p99('ttft') * 1e3:.0f}" if serving else "-",
            f"{one.p99('tpot') * 1e3:.1f}" if serving else "-",
            f"{one.harvest:.2f}" if one.harvest is not None else "-",
            f"{one.sync_share:.1%}",
            f"{one.allocation_overhead:.1%}",
            _share(one.hit_rate_alone),
            _share(one.hit_rate),
        ])  # fmt: skip
    quiet = plan.serving_alone
    p99 = (f"{quiet.p99('ttft') * 1e3:.0f}", f"{quiet.p99('tpot') * 1e3:.1f}")
    rows.append(["serving alone", "-", "-", _met(quiet.attainment), *p99, "-", "-", "-",
                 _share(quiet.hit_rate_alone), _share(quiet.hit_rate)])  # fmt: skip
    head = ["", "throughput vs fixed", "rollout s", "SLO met", "P99 TTFT ms", "P99 TPOT ms",
            "harvest", "weight sync", "allocation", "prefix hits alone", "lent"]  # fmt: skip
    shown = len(head) - (2 if quiet.hit_rate is None else 0)
    return _table(head[:shown], [row[:shown] for row in rows])


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _spread(says: str, steps: list[StepTime]) -> list[str]:
    seconds, batches = [step.seconds for step in steps], [step.batches for step in steps]
    three = (min(seconds), median(seconds), max(seconds))
    return [says, *(f"{one:,.0f}" for one in three), f"{min(batches):.1f}", f"{max(batches):.1f}"]


def _met(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.2%}" if share >= KEPT else f'<span class="late">{share:.2%}</span>'


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"
