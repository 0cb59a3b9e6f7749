"""`rose bench ...`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Measure, side by side in one run.")


@app.command()
def executor(
    quick: Annotated[bool, typer.Option(help="One scenario, few requests; says so.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
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
    out: Annotated[Path, typer.Option(help="Folder for pictures and logs.")] = Path("bench-out"),
) -> None:
    """Serving alone, rollout alone, share-all, static split and rose on one device."""
    from rose.bench import executor as bench
    from rose.bench import report, timeline
    from rose.cluster.config import ConfigError
    from rose.executor.slo import Slo

    console = Console()
    began = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.0f} s[/] {line}", highlight=False)

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
    target = json_file or out / "executor.json"
    result: dict[str, Any] = {}

    def keep(so_far: dict[str, Any]) -> None:
        result.update(so_far)
        report.write(so_far, target)

    try:
        runs = bench.main(settings, say, keep)
    except ConfigError as error:
        typer.echo(f"rose: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        kept = f"; finished scenarios are in {target}" if result else ""
        typer.echo(f"rose: stopped, both engines ended{kept}", err=True)
        raise typer.Exit(130) from None
    for name, by_mode in runs.items():
        shown = [by_mode[m][-1] for m in ("serving_alone", "share_all", "rose") if by_mode.get(m)]
        picture = out / f"executor_{name}.png"
        kv_total = int(settings.kv_gb * (1 << 30))
        slo = Slo(**result["modes"][name]["slo"])
        timeline.draw(shown, slo, kv_total, f"{model} on {device}, {name}", picture)
        say(f"picture: {picture}")
    report.table(result, console)
    if quick:
        console.print("--quick: few requests per mode, so every P99 is rough")
    console.print(f"written: {target}")


@app.command()
def transfer(
    quick: Annotated[bool, typer.Option(help="One density, one repeat; says so.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    model: Annotated[str, typer.Option(help="Model of trainer and engine.")] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu:N or cpu:N-M")] = "cpu:0",
    repeats: Annotated[int, typer.Option(min=1, help="Versions of each kind and link.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the result and logs.")] = Path("bench-out"),
) -> None:
    """Dense, COO, XOR + zstd and rose; real RL updates; versions into a running engine."""
    from rose.bench import report
    from rose.bench import transfer as bench
    from rose.cluster.config import ConfigError

    console = Console()
    began = time.monotonic()
    target = json_file or out / "transfer.json"
    result: dict[str, Any] = {}

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.0f} s[/] {line}", highlight=False)

    def keep(so_far: dict[str, Any]) -> None:
        result.update(so_far)
        report.write(so_far, target)

    settings = bench.Settings(model=model, device=device, repeats=repeats, quick=quick, out=out)
    try:
        bench.main(settings, say, keep)
    except ConfigError as error:
        typer.echo(f"rose: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        kept = f"; finished parts are in {target}" if result else ""
        typer.echo(f"rose: stopped{kept}", err=True)
        raise typer.Exit(130) from None
    report.transfer_table(result, console)
    report.table(result, console)
    if quick:
        console.print("--quick: one repeat of everything, so all ratios are rough")
    console.print(f"written: {target}")
