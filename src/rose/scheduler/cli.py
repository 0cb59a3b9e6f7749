"""`rose scheduler`, `rose ps`, `rose top`. Heavy imports happen inside the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from rose.terminal import fail

SECRET = "ROSE_SCHEDULER_SECRET"
Url = Annotated[str, typer.Argument(help="The scheduler.")]
URL = "http://127.0.0.1:8400"


def ps(
    url: Url = URL, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Engines, turns and versions of a running scheduler."""
    import json

    from rich.console import Console

    from rose.scheduler import view

    try:
        found = view.ask(url, os.environ.get(SECRET, ""))
    except (OSError, ValueError) as error:
        fail(f"{url} is no scheduler that answers: {error}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(view.tables(found))


def top(url: Url = URL) -> None:
    """The same, live; Ctrl-C ends it."""
    import contextlib

    from rich.console import Console

    from rose.scheduler import view

    try:
        with contextlib.suppress(KeyboardInterrupt):
            view.watch(url, os.environ.get(SECRET, ""), Console())
    except (OSError, ValueError) as error:
        fail(f"{url} is no scheduler that answers: {error}")


def scheduler(
    engine: Annotated[
        list[str] | None,
        typer.Option(help="URL of a rollout engine that no node reports; may be repeated."),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME[,share=S][,most_running=N][,max_borrowed=N][,max_staleness=V]"
            "[,per_version=N][,weights=URL]; all but the first are at /jobs/NAME/."
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(help=f"HOST:PORT; to be reached from elsewhere set {SECRET}.")
    ] = "127.0.0.1:8400",
    ledger: Annotated[Path, typer.Option(help="File that survives a restart.")] = Path(
        "rose-ledger.sqlite"
    ),
    placement: Annotated[str, typer.Option(help="Where turns go; see docs/scheduler.md.")] = "cost",
    order: Annotated[str, typer.Option(help="Which turn is next.")] = "longest_first",
    stall_s: Annotated[float, typer.Option(help="Silence that means that an engine hangs.")] = 2.0,
    most_waiting: Annotated[int, typer.Option(min=1, help="Turns that may wait.")] = 10_000,
    max_borrowed: Annotated[int, typer.Option(min=0, help="Serving devices to borrow.")] = 1000,
    keep_s: Annotated[
        float, typer.Option(min=0, help="How long a borrowed device that is not needed is kept.")
    ] = 60.0,
    grace_s: Annotated[
        float, typer.Option(min=0, help="How long a request with an id goes on without its client.")
    ] = 30.0,
    verbose: Annotated[bool, typer.Option(help="Log every turn.")] = False,
) -> None:
    """One URL in front of many rollout engines: looks like one vLLM server to an RL framework."""
    import uvloop

    from rose.net import is_loopback
    from rose.scheduler import jobspec
    from rose.scheduler import order as orders
    from rose.scheduler import placement as placements
    from rose.scheduler.ledger import LedgerError
    from rose.scheduler.process import Settings, run

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        fail(f"--listen {listen} is not HOST:PORT")
    secret = os.environ.get(SECRET, "")
    if not is_loopback(host) and not secret:
        fail(f"--listen {listen} can be reached from elsewhere: set {SECRET}")
    for url in engine or ():
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            fail(f"--engine {url} is not a URL such as http://127.0.0.1:8302")
    if placement not in placements.POLICIES:
        fail(f"--placement {placement}: choose from {', '.join(placements.POLICIES)}")
    if order not in orders.POLICIES:
        fail(f"--order {order}: choose from {', '.join(orders.POLICIES)}")
    if stall_s <= 0:
        fail(f"--stall-s {stall_s:g} is not above 0")
    try:
        jobs = tuple(jobspec.parse(text) for text in job or ["default"])
    except ValueError as error:
        fail(f"--job: {error}")
    if len({one.name for one in jobs}) < len(jobs):
        fail("--job: a name is used twice")
    settings = Settings(
        engines=tuple(url.rstrip("/") for url in engine or ()),
        jobs=jobs,
        host=host,
        port=int(port),
        ledger=ledger,
        placement=placement,
        order=order,
        stall_s=stall_s,
        most_waiting=most_waiting,
        grace_s=grace_s,
        most_borrowed=max_borrowed,
        keep_s=keep_s,
        secret=secret,
        verbose=verbose,
    )
    try:
        uvloop.run(run(settings))
    except (LedgerError, OSError) as error:
        fail(error)
