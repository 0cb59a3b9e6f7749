"""`rose plan`. Heavy imports happen inside the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rose.terminal import fail

if TYPE_CHECKING:
    from rose.plan.planner import Plan
    from rose.plan.presets import Row
    from rose.plan.progress import Say


def plan(
    fleet: Annotated[
        Path | None,
        typer.Argument(
            help="The fleet's TOML file, see docs/plan.md; or a word: validate, stress, speed."
        ),
    ] = None,
    stressed: Annotated[
        Path | None,
        typer.Argument(help="For stress: the fleet's TOML file; a small fleet without one."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="The paper's settings: paper-8b-grpo, paper-32b-dapo, ...")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a report here.")] = None,
    executor: Annotated[
        Path | None,
        typer.Option(
            help="With validate: what `rose bench executor` measured. "
            "[default: bench-out/executor.json, if it is there]"
        ),
    ] = None,
    e2e: Annotated[
        Path | None,
        typer.Option(
            help="The same of `rose bench e2e`. [default: bench-out/e2e.json, if it is there]"
        ),
    ] = None,
    tries: Annotated[int, typer.Option(min=1, help="Patterns of each search of stress.")] = 280,
    seed: Annotated[int, typer.Option(min=0, help="Of the search of stress.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Write the worst patterns of stress here, to replay them.")
    ] = None,
    most: Annotated[
        int, typer.Option(min=1_024, help="Devices and trajectories of speed's largest fleet.")
    ] = 65_536,
    plot: Annotated[Path | None, typer.Option(help="Draw what speed measured here.")] = None,
) -> None:
    """What would a fleet gain by lending, and is its p99 safe? Simulated, on the live policies."""
    from rose.cluster.config import ConfigError

    console = Console()
    try:
        with _progress(console) as say:
            if (fleet is None) == (preset is None):
                fail("give a fleet's TOML file or --preset, one of both")
            if preset is not None:
                result = _preset(preset, say)
            elif stressed is not None and fleet != Path("stress"):
                fail(f"{stressed}: only stress takes a second word, a fleet's TOML file")
            elif fleet == Path("validate"):
                result = _validate(executor, e2e, say)
            elif fleet == Path("stress"):
                result = _stress(stressed, tries, seed, keep, page, say)
            elif fleet == Path("speed"):
                result = _speed(most, plot, say)
            else:
                assert fleet is not None
                result = _fleet(fleet, page, say)
    except (ConfigError, ValueError) as error:
        fail(error)
    except KeyboardInterrupt:
        typer.echo("rose: stopped")
        raise typer.Exit(130) from None
    shown, found = result
    for table in shown:
        console.print(table)
    if page is not None and page.exists():
        console.print(f"report: {page}")
    if json_file is not None:
        _write(json_file, json.dumps(found, indent=2) + "\n")
        console.print(f"written: {json_file}")


@contextmanager
def _progress(console: Console) -> Iterator[Say]:
    columns = (TimeElapsedColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def say(line: str) -> Callable[[float], None]:
            bar.update(task, description=line, total=None)
            return lambda share: bar.update(task, completed=share, total=1.0)

        yield say


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


Shown = tuple[list[Any], dict[str, Any]]


def _preset(name: str, say: Say) -> Shown:
    from rose.plan import presets

    rows = presets.compare(presets.preset(name), say)
    table = Table("", "paper", "simulated", "error", title=name, title_justify="left")
    for row in rows:
        error = "-" if row.error is None else f"{row.error:.0%}"
        table.add_row(row.name, row.paper, f"{row.simulated:.4g}", error)
    free = Table("free parameter", "source", title="what the paper does not say",
                 title_justify="left")  # fmt: skip
    for parameter, source in presets.FREE.items():
        free.add_row(parameter, source)
    return [table, free], {
        "bench": "plan",
        "settings": {"preset": name, "free": presets.FREE},
        "modes": {row.name: _plain(row) for row in rows},
        "ratios": presets.ratios(rows),
    }


def _validate(executor: Path | None, e2e: Path | None, say: Say) -> Shown:
    from rose.plan.validation.command import shown, validate

    files, rows = validate(executor, e2e, say)
    return shown(files, rows)


def _stress(
    path: Path | None, tries: int, seed: int, keep: Path | None, page: Path | None, say: Say
) -> Shown:
    from rose.plan import fleet_file, tables
    from rose.plan.page import stress
    from rose.plan.stress import bed, cases, report

    scenario = bed.bed() if path is None else bed.reduced(fleet_file.load(path)[0])
    found = report.run(scenario, tries, seed, say)
    if keep is not None:
        cases.write(keep, found.worst.values())
    if page is not None:
        _write(page, stress(found))
    return tables.stress(found), report.result(found)


def _speed(most: int, plot: Path | None, say: Say) -> Shown:
    from rose.bench.executor import machine
    from rose.plan import presets, speed, tables

    found = speed.ladders(presets.preset(speed.PRESET).scenario, most, say)
    if plot is not None:
        speed.draw(found, plot)
    return tables.speed(found), speed.result(found, machine())


def _plain(row: Row) -> dict[str, Any]:
    return {"paper": row.paper, "simulated": row.simulated, "error": row.error}


def _fleet(path: Path, page: Path | None, say: Say) -> Shown:
    from rose.plan import fleet_file
    from rose.plan.money import Prices
    from rose.plan.page import page as written
    from rose.plan.planner import plan as make_plan

    scenario, prices = fleet_file.load(path)
    told = prices.model_dump()
    accept, multiplier = told.pop("accept_rate"), told.pop("reasoning_multiplier")
    found = make_plan(
        scenario, Prices(**told), accept_rate=accept, reasoning_multiplier=multiplier, say=say
    )
    if page is not None:
        _write(page, written(found))
    return _tables(found), _result(found)


def _tables(found: Plan) -> list[Any]:
    from rose.plan.systems import SYSTEMS

    fixed = found.fixed.throughput
    systems = Table("", "throughput vs fixed", "rollout s", "SLO met", "P99 TTFT / TPOT ms",
                    "harvest", "weights", title=found.scenario.name)  # fmt: skip
    quiet = found.serving_alone
    if quiet.hit_rate is not None:
        systems.add_column("prefix hits alone, lent")
    for name, one in found.outcomes.items():
        systems.add_row(
            SYSTEMS[name].says, f"{one.throughput / fixed:.2f}", _rollout_s(one),
            "-" if one.attainment is None else f"{one.attainment:.2%}",
            "-" if one.attainment is None else _p99(one),
            "-" if one.harvest is None else f"{one.harvest:.2f}", f"{one.sync_share:.1%}",
            *_hits(one, quiet),
        )  # fmt: skip
    systems.add_row("serving alone", "-", "-", f"{quiet.attainment or 0:.2%}", _p99(quiet), "-",
                    "-", *_hits(quiet, quiet))  # fmt: skip
    what_if = Table("what if", "throughput vs fixed", "SLO met", title_justify="left")
    for name, row in found.sensitivity.items():
        what_if.add_row(name, f"{row['throughput_vs_fixed']:.2f}", f"{row['slo_attainment']:.2%}")
    answer = found.answer
    assert answer is not None
    words = f"borrow at most {answer.max_borrowed} devices, headroom {answer.headroom:.0%}: "
    words += answer.why
    warnings = [f"[red]{warning}[/]" for warning in found.warnings]
    return [systems, *warnings, what_if, f"[{'green' if answer.safe else 'red'}]{words}[/]"]


def _rollout_s(one: Any) -> str:
    each = [step.rollout_s for step in one.steps]
    return f"{one.rollout_s:.0f} ({min(each):.0f}-{max(each):.0f})"


def _p99(one: Any) -> str:
    return f"{one.p99('ttft') * 1e3:.0f} / {one.p99('tpot') * 1e3:.1f}"


def _hits(one: Any, quiet: Any) -> list[str]:
    """A cell, if anybody comes back."""
    if one.hit_rate is None:
        return [] if quiet.hit_rate is None else ["-"]
    return [f"{one.hit_rate_alone:.1%}, {one.hit_rate:.1%}"]


def _result(found: Plan) -> dict[str, Any]:
    fixed = found.fixed.throughput
    answer = found.answer
    assert answer is not None
    return {
        "bench": "plan",
        "settings": {"fleet": found.scenario.name, "seed": found.scenario.seed},
        "modes": {
            name: {
                "throughput": one.throughput,
                "steady": one.steady,
                "step_s": [step.seconds for step in one.steps],
                "rollout_s": [step.rollout_s for step in one.steps],
                "batches": [step.batches for step in one.steps],
                "slo_attainment": one.attainment,
                "ttft_p99_s": None if one.attainment is None else one.p99("ttft"),
                "tpot_p99_s": None if one.attainment is None else one.p99("tpot"),
                "prefix_hit_rate_alone": one.hit_rate_alone,
                "prefix_hit_rate": one.hit_rate,
                "harvest_efficiency": one.harvest,
                "allocation_overhead": one.allocation_overhead,
                "weight_sync_share": one.sync_share,
                "lent": one.lent,
                "money": found.money[name],
                "opportunistic_parts": found.parts[name],
            }
            for name, one in found.outcomes.items()
        },
        "ratios": {
            f"throughput_vs_fixed_{name}": one.throughput / fixed
            for name, one in found.outcomes.items()
        }
        | {"max_borrowed": answer.max_borrowed, "headroom": answer.headroom, "safe": answer.safe},
        "sensitivity": found.sensitivity,
    }
