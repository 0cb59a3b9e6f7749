"""`rose bench ...`"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Measure, side by side in one run.")

Quick = Annotated[bool, typer.Option(help="Little of everything; says so.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result here.")]
Out = Annotated[Path, typer.Option(help="Folder for results, pictures and logs.")]
OUT = Path("bench-out")


class _Bench:
    """A benchmark on the terminal: says when what was done, keeps what is done so far."""

    def __init__(self, name: str, out: Path, json_file: Path | None) -> None:
        self.console = Console()
        self.target = json_file or out / f"{name}.json"
        self.result: dict[str, Any] = {}
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        self.console.print(
            f"[dim]{time.monotonic() - self._began:6.0f} s[/] {line}", highlight=False
        )

    def keep(self, so_far: dict[str, Any]) -> None:
        from rose.bench import report

        self.result.update(so_far)
        report.write(so_far, self.target)

    @contextmanager
    def running(self) -> Iterator[None]:
        from rose.bench.traces import TraceError
        from rose.bench.trust.rig import DrillError
        from rose.cluster.config import ConfigError

        try:
            yield
        except (ConfigError, DrillError, TraceError) as error:
            typer.echo(f"rose: {error}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            kept = f"; finished parts are in {self.target}" if self.result else ""
            typer.echo(f"rose: stopped, nothing is left running{kept}", err=True)
            raise typer.Exit(130) from None

    def show(self, rough: str | None) -> None:
        from rose.bench import report

        report.table(self.result, self.console)
        if rough:
            self.console.print(f"--quick: {rough}")
        self.console.print(f"written: {self.target}")


@app.command()
def executor(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="Model of both engines.")] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu:N or cpu:N-M")] = "cpu:0",
    seconds: Annotated[float, typer.Option(min=10, help="Window of one mode.")] = 50.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all modes.")] = 3,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Only these, e.g. steady_60 bursty_20; all by default.")
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="Only these, beside serving alone and rollout alone.")
    ] = None,
    out: Out = OUT,
) -> None:
    """Serving alone, rollout alone, share-all, static split and rose on one device."""
    from rose.bench import executor as bench
    from rose.bench import timeline
    from rose.executor.slo import Slo

    settings = bench.Settings(
        model=model,
        device=device,
        seconds=seconds,
        repeats=repeats,
        quick=quick,
        only=tuple(scenario or ()),
        modes=tuple(mode or ()),
        out=out,
    )
    shown = _Bench("executor", out, json_file)
    with shown.running():
        runs = bench.main(settings, shown.say, shown.keep)
    for name, by_mode in runs.items():
        drawn = [by_mode[m][-1] for m in ("serving_alone", "share_all", "rose") if by_mode.get(m)]
        picture = out / f"executor_{name}.png"
        told = shown.result["modes"][name]
        kv_total, slo = int(told["kv_gb"] * (1 << 30)), Slo(**told["slo"])
        timeline.draw(drawn, slo, kv_total, f"{model} on {device}, {name}", picture)
        shown.say(f"picture: {picture}")
    shown.show("few requests per mode, so every P99 is rough" if quick else None)


@app.command()
def trust(
    quick: Quick = False,
    json_file: JsonFile = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Simulated histories; 10,000, or 1,000 with --quick.")
    ] = None,
    drill: Annotated[bool, typer.Option(help="Also break real engines.")] = True,
    out: Out = OUT,
) -> None:
    """Does the promise to serving hold, whatever breaks? Simulation, planted holes, fault drill."""
    from rose.bench.trust import bench

    chosen = seeds or (bench.QUICK_SEEDS if quick else bench.SEEDS)
    settings = bench.Settings(seeds=chosen, quick=quick, drilled=drill, out=out)
    shown = _Bench("trust", out, json_file)
    with shown.running():
        bench.main(settings, shown.say, shown.keep)
    shown.show("fewer histories, and a dozen revocations where all is well" if quick else None)


@app.command()
def transfer(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="Model of trainer and engine.")] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu:N or cpu:N-M")] = "cpu:0",
    repeats: Annotated[int, typer.Option(min=1, help="Versions of each kind and link.")] = 3,
    out: Out = OUT,
) -> None:
    """Dense, COO, XOR + zstd and rose; real RL updates; versions into a running engine."""
    from rose.bench import report
    from rose.bench import transfer as bench

    settings = bench.Settings(model=model, device=device, repeats=repeats, quick=quick, out=out)
    shown = _Bench("transfer", out, json_file)
    with shown.running():
        bench.main(settings, shown.say, shown.keep)
    report.transfer_table(shown.result, shown.console)
    shown.show("one repeat of everything, so all ratios are rough" if quick else None)


@app.command()
def scheduler(
    quick: Quick = False,
    json_file: JsonFile = None,
    record: Annotated[
        Path | None, typer.Option(help="Recorded agents' calls (CSV); drawn from laws otherwise.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=5, help="Window of a part.")] = 20.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all policies.")] = 1,
    out: Out = OUT,
) -> None:
    """What the scheduler adds to a turn; placements and orders side by side."""
    from rose.bench import scheduler as bench

    settings = bench.Settings(record, seconds, repeats, quick, out)
    shown = _Bench("scheduler", out, json_file)
    with shown.running():
        bench.main(settings, shown.say, shown.keep)
    shown.show("few engines and one repeat, so all ratios are rough" if quick else None)


@app.command()
def e2e(
    quick: Quick = False,
    json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="Policy that is trained.")] = "medium-wordy",
    steps: Annotated[int, typer.Option(min=2, help="RL steps of a run.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all modes.")] = 3,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="grpo, dapo; both by default.")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Only these; all by default.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals of serving; drawn from laws without one.")
    ] = None,
    out: Out = OUT,
) -> None:
    """One agent trained with static resources, elastic, share-all and rose, beside serving."""
    from rose.bench import e2e as bench
    from rose.bench import report
    from rose.bench.arena import MODES

    settings = bench.Settings(
        model=model,
        steps=steps,
        repeats=repeats,
        algorithms=tuple(algorithm or ("grpo", "dapo")),
        modes=tuple(mode or MODES),
        trace=trace,
        quick=quick,
        out=out,
    )
    shown = _Bench("e2e", out, json_file)
    with shown.running():
        bench.main(settings, shown.say, shown.keep)
    report.e2e_table(shown.result, shown.console)
    shown.show("one short run of each mode, so all ratios are rough" if quick else None)
