"""A plan as one HTML page: the answer first, then tables and charts; needs nothing but itself."""

from __future__ import annotations

import html
import io
from typing import Any

from rose.plan.planner import Plan
from rose.plan.systems import SYSTEMS

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
COLOURS = {"rose": "#d9822b", "rose_published": "#8a5a1a", "fixed": "#7a7f87"}
OTHER = "#2a6fbb"
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
        _bars(plan),
        "<h2>Devices lent over time</h2>",
        _lent(plan),
        "<h2>How many devices</h2>",
        _table(
            ["at most", "throughput vs fixed", "SLO met"],
            [[str(n), f"{o.throughput / plan.fixed.throughput:.2f}", _met(o.attainment)]
             for n, o in plan.borrowed.items()],
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
            [[name, *(f"{row[key]:.3g}" for key in _LINES)] for name, row in plan.money.items()],
        ),
        '<p class="note">Prices and what each line contains: docs/plan.md. All numbers here are '
        "simulated.</p>",
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(plan.scenario.name)}</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
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
            f"{one.allocation_overhead:.1%}",
        ])  # fmt: skip
    quiet = plan.serving_alone
    p99 = (f"{quiet.p99('ttft') * 1e3:.0f}", f"{quiet.p99('tpot') * 1e3:.1f}")
    rows.append(["serving alone", "-", "-", _met(quiet.attainment), *p99, "-", "-"])
    return _table(
        ["", "throughput vs fixed", "rollout s", "SLO met", "P99 TTFT ms", "P99 TPOT ms", "harvest",
         "allocation"], rows,
    )  # fmt: skip


def _met(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.2%}" if share >= KEPT else f'<span class="late">{share:.2%}</span>'


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _bars(plan: Plan) -> str:
    figure, axes = _figure(len(plan.outcomes) * 0.38 + 0.8)
    names = list(plan.outcomes)
    values = [plan.outcomes[n].throughput / plan.fixed.throughput for n in names]
    colours = [COLOURS.get(name, OTHER) for name in names]
    bars = axes.barh([SYSTEMS[n].says for n in names], values, color=colours, height=0.65)
    axes.bar_label(bars, [f" {value:.2f}" for value in values])
    axes.invert_yaxis()
    axes.set_xlabel("throughput against the fixed fleet")
    return _svg(figure)


def _lent(plan: Plan) -> str:
    figure, axes = _figure(2.6)
    for name, one in plan.outcomes.items():
        if one.lent:
            times, counts = zip(*one.lent, strict=True)
            end = sum(step.seconds for step in one.steps)
            axes.step([*times, end], [*counts, counts[-1]], where="post", label=SYSTEMS[name].says,
                      color=COLOURS.get(name))  # fmt: skip
    axes.set_xlabel("seconds")
    axes.set_ylabel("devices lent")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


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
