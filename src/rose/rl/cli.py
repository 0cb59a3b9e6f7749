"""`rose train`. Heavy imports happen inside the command."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from rose.terminal import fail


def train(
    config: Annotated[Path, typer.Argument(help="The run's TOML file; see docs/tutorial.md.")],
) -> None:
    """Train an agent against a running cluster; goes on where it was if it was stopped."""
    from rich.console import Console

    from rose.cluster.config import ConfigError
    from rose.rl import run
    from rose.rl.door import DoorError
    from rose.rl.report import line, write
    from rose.scheduler.cli import SECRET
    from rose.transfer.store import StoreError

    console = Console()
    try:
        chosen = run.load(config)
        from rose.rl.loop import Trainer

        trainer = Trainer(chosen, console.print, os.environ.get(SECRET, ""))
        asyncio.run(trainer.play(lambda facts: console.print(line(facts), highlight=False)))
    except* (ConfigError, DoorError, StoreError) as failed:
        fail(failed.exceptions[0])
    except* KeyboardInterrupt:
        typer.echo("rose: stopped; the same command goes on from the last checkpoint")
        raise typer.Exit(130) from None
    for picture in write(chosen.out):
        console.print(f"picture: {picture}")
