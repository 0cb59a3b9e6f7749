"""`rose scheduler`. Heavy imports happen inside the command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer

SECRET = "ROSE_SCHEDULER_SECRET"


def _fail(message: object) -> NoReturn:
    typer.echo(f"rose: {message}", err=True)
    raise typer.Exit(2)


def ps(
    url: Annotated[str, typer.Argument(help="The scheduler.")] = "http://127.0.0.1:8400",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Engines, turns and versions of a running scheduler."""
    import json
    import urllib.request

    from rich.console import Console
    from rich.table import Table

    asked = urllib.request.Request(f"{url.rstrip('/')}/rose/v1/status")
    if secret := os.environ.get(SECRET):
        asked.add_header("Authorization", f"Bearer {secret}")
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            found = json.load(answer)
    except (OSError, ValueError) as error:
        _fail(f"{url} is no scheduler that answers: {error}")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    engines = Table(
        "engine", "lease", "standing", "turns", "slots", "version", "ms/token", "cuts/min"
    )
    for one in found["engines"]:
        shown = (one["turns"], one["slots"], one["version"] or "-")
        rates = (f"{one['ms_per_token']:.1f}", f"{one['cuts_per_min']:.1f}")
        engines.add_row(one["url"], one["lease"], one["standing"], *map(str, shown), *rates)
    jobs = Table("job", "waiting", "running", "version")
    for name, job in found["jobs"].items():
        jobs.add_row(name, str(job["waiting"]), str(job["running"]), str(job["version"] or "-"))
    console = Console()
    console.print(engines)
    console.print(jobs)


def scheduler(
    engine: Annotated[
        list[str] | None,
        typer.Option(help="URL of a rollout engine that no node reports; may be repeated."),
    ] = None,
    job: Annotated[
        list[str] | None, typer.Option(help="A job; all but the first are at /jobs/NAME/.")
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
    grace_s: Annotated[
        float, typer.Option(min=0, help="How long a request with an id goes on without its client.")
    ] = 30.0,
) -> None:
    """One URL in front of many rollout engines: looks like one vLLM server to an RL framework."""
    import uvloop

    from rose.scheduler import order as orders
    from rose.scheduler import placement as placements
    from rose.scheduler.ledger import LedgerError
    from rose.scheduler.process import Settings, run
    from rose.web import is_loopback

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        _fail(f"--listen {listen} is not HOST:PORT")
    secret = os.environ.get(SECRET, "")
    if not is_loopback(host) and not secret:
        _fail(f"--listen {listen} can be reached from elsewhere: set {SECRET}")
    for url in engine or ():
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            _fail(f"--engine {url} is not a URL such as http://127.0.0.1:8302")
    if placement not in placements.POLICIES:
        _fail(f"--placement {placement}: choose from {', '.join(placements.POLICIES)}")
    if order not in orders.POLICIES:
        _fail(f"--order {order}: choose from {', '.join(orders.POLICIES)}")
    if stall_s <= 0:
        _fail(f"--stall-s {stall_s:g} is not above 0")
    settings = Settings(
        engines=tuple(url.rstrip("/") for url in engine or ()),
        jobs=tuple(job or ["default"]),
        host=host,
        port=int(port),
        ledger=ledger,
        placement=placement,
        order=order,
        stall_s=stall_s,
        most_waiting=most_waiting,
        grace_s=grace_s,
        most_borrowed=max_borrowed,
        secret=secret,
    )
    try:
        uvloop.run(run(settings))
    except (LedgerError, OSError) as error:
        _fail(error)
