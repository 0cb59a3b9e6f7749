"""`rose ...`: the command line. Heavy imports happen inside the commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from rose.bench.bench_cli import app as bench_app
from rose.bench.load_cli import load
from rose.cluster.cluster_cli import up
from rose.plan.cli import plan
from rose.rl.cli import train
from rose.scheduler.cli import ps, scheduler, top
from rose.terminal import fail
from rose.transfer.cli import relay, weights_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
page_app = typer.Typer(no_args_is_help=True, help="Look at a device's control page.")
models_app = typer.Typer(no_args_is_help=True, help="Models that work offline.")
app.add_typer(page_app, name="page")
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.add_typer(weights_app, name="weights")
app.command()(load)
app.command()(plan)
app.command()(relay)
app.command()(train)
app.command()(scheduler)
app.command()(ps)
app.command()(top)
app.command()(up)


@app.command()
def node(
    config: Annotated[Path, typer.Argument(help="The node's TOML file; see docs/sre.md.")],
) -> None:
    """Own the engines of one device: serving beside a dormant rollout engine, and the API."""
    from rose.cluster import api
    from rose.cluster.config import ConfigError
    from rose.cluster.config import load as load_config
    from rose.logs import log_as_json

    log_as_json()
    try:
        asyncio.run(api.run_until_signal(load_config(config)))
    except ConfigError as error:
        fail(error)


@page_app.command("dump")
def page_dump(
    path: Annotated[Path, typer.Argument(help="The page, e.g. /dev/shm/rose-cpu0-0")],
) -> None:
    """Print everything on a control page as JSON."""
    from rose.executor.page import Page, PageError

    try:
        shown = Page.open(path).describe()
    except PageError as error:
        fail(error)
    typer.echo(json.dumps(shown, indent=2))


@models_app.command("make")
def models_make(
    name: Annotated[
        str,
        typer.Argument(help="tiny, tiny-wordy, small, medium-wordy, smollm2; random: tiny-a, -b"),
    ],
    path: Annotated[Path | None, typer.Argument(help="Folder to make it in.")] = None,
) -> None:
    """Make a model on this machine, without a hub."""
    from rose import models

    if name not in models.MAKERS:
        fail(f"model {name!r} is unknown: choose from {', '.join(models.MAKERS)}")
    typer.echo(models.MAKERS[name](path) if path else models.resolve(name))


@app.command()
def profile(
    model: Annotated[str, typer.Option(help="A model folder, or a name of `rose models`.")],
    device: Annotated[str, typer.Option(help="cpu:N, cpu:N-M or cuda:N")] = "cpu:0",
    dtype: Annotated[str, typer.Option(help="auto: float32 on CPU.")] = "auto",
    max_batch: Annotated[int, typer.Option(min=1, help="Largest decode batch.")] = 32,
    max_prompt: Annotated[int, typer.Option(min=16, help="Longest prompt.")] = 512,
    out: Annotated[Path | None, typer.Option(help="Where to save; default: rose's cache.")] = None,
) -> None:
    """Measure step time against prefill tokens, decode batch and context, and save the fit."""
    from rose import models
    from rose.cluster.device import parse_device
    from rose.cluster.profiles import path_for

    try:
        where = parse_device(device)
        # Before anything imports torch: making a model would.
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(len(where.cores) or 1),
        }
        folder = models.resolve(model)
    except ValueError as error:
        fail(error)
    from rich.console import Console
    from rich.progress import Progress

    from rose.executor.vllm.profiling import measure

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"profiling {model} on {device}")
        measured = measure(
            folder,
            device,
            dtype="float32" if dtype == "auto" and where.cores else dtype,
            max_batch=max_batch,
            max_prompt=max_prompt,
            cores=where.cores,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    target = out or path_for(model, dtype, device)
    measured.save(target)
    typer.echo(
        f"{target}\n"
        f"  step = {measured.fixed_s * 1e3:.1f} ms + {measured.per_prefill_s * 1e3:.3f} ms/prefill "
        f"token + {measured.per_decode_s * 1e3:.3f} ms/decode sequence + "
        f"{measured.per_context_s * 1e6:.2f} us/context token\n"
        f"  median error {measured.error:.1%}, 99 % of {measured.steps} steps under "
        f"{measured.margin:.2f} x the line"
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and logs.")] = Path("demo-out"),
) -> None:
    """Train an agent beside a serving engine, without and with its device; live, then a verdict."""
    from rich.console import Console

    from rose.bench.demo import show
    from rose.cluster.config import ConfigError

    out.mkdir(parents=True, exist_ok=True)
    try:
        kept = asyncio.run(show(out, Console()))
    except ConfigError as error:
        fail(error)
    except KeyboardInterrupt:
        typer.echo("rose: stopped, both engines ended")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if kept else 1)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: engines too
    app()


if __name__ == "__main__":
    main()
