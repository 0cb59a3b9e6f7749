"""`rose up`. Heavy imports happen inside the command."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rose.terminal import fail

if TYPE_CHECKING:
    from rose.cluster.cluster_config import ClusterConfig
    from rose.cluster.up import Cluster

PIPED = 200
"""Columns where no terminal bounds them: a URL stays on its line."""


def up(
    config: Annotated[
        Path, typer.Argument(help="The cluster's TOML file, such as examples/cluster-cpu.toml.")
    ],
) -> None:
    """Start a whole cluster on this machine and keep it running; Ctrl-C ends all of it."""
    from rose.cluster.cluster_config import load
    from rose.cluster.config import ConfigError

    console = Console(width=None if sys.stdout.isatty() else PIPED)
    try:
        asyncio.run(_until_signal(load(config), console))
    except ConfigError as error:
        fail(error)


async def _until_signal(config: ClusterConfig, console: Console) -> None:
    from rose.cluster.up import running

    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def leave() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, say, "still stopping")
        say("stopping everything")
        me.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    with suppress(asyncio.CancelledError):
        async with running(config, say) as cluster:
            say(f"your framework's vLLM server is {cluster.scheduler_url}")
            console.print(table(cluster))
            await asyncio.Event().wait()
    say("everything has ended")


def table(cluster: Cluster) -> Table:
    """What runs, and who needs which URL."""
    config = cluster.config
    shown = Table("what", "URL", "for")
    shown.add_row("scheduler", cluster.scheduler_url, "your RL framework; rose ps, rose top")
    if config.weights is not None:
        jobs = ", ".join(j.name for j in config.jobs if j.weights == cluster.weights_url)
        shown.add_row("store", cluster.store_url, f"your trainer's publisher; job {jobs}")
        shown.add_row("weights", cluster.weights_url, "engines, which fetch versions there")
    for node in cluster.nodes:
        kind = "dedicated to rollouts" if node.serving_url is None else "its API"
        shown.add_row(node.name, node.url, kind)
        if node.serving_url is not None:
            shown.add_row("", node.serving_url, "serving users")
    shown.add_row("logs", str(config.logs), "")
    return shown
