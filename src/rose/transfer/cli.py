"""`rose relay` and `rose weights ...`. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from rose.terminal import fail

if TYPE_CHECKING:
    from rose.transfer.inspect import StepFacts, TensorFacts
    from rose.transfer.manifest import Step
    from rose.transfer.store import Store
    from rose.transfer.store.files import FileStore
    from rose.transfer.store.server import Served

log = logging.getLogger("rose.transfer")
weights_app = typer.Typer(no_args_is_help=True, help="Serve published weights, or look at them.")

FOLLOW_S = 1.0
"""How often a relay looks for new versions."""
TENSOR = ("name", "dtype", "shape", "changed", "density", "bytes")
"""What is shown of each tensor."""
PIPED = 400
"""Columns of a table that no terminal bounds: names stay on their line for `grep`."""

Url = Annotated[
    str, typer.Argument(help="The store: file:///folder, tcp://host:port or tls://host:port.")
]
Job = Annotated[str, typer.Option(help="Name of the job.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Listen = Annotated[
    str, typer.Option(help="HOST:PORT; to be reached from elsewhere set ROSE_TRANSFER_SECRET.")
]
Certificate = Annotated[Path | None, typer.Option(help="PEM file: speak TLS.")]
Key = Annotated[Path | None, typer.Option(help="PEM file: the certificate's key.")]


# ---- serving


def relay(
    upstream: Url,
    job: Annotated[list[str], typer.Option(help="A job to pass on; may be repeated.")],
    folder: Annotated[Path, typer.Option(help="Where versions are kept.")],
    listen: Listen = "127.0.0.1:7400",
    most_gb: Annotated[float | None, typer.Option(help="Disk allowance of each job.")] = None,
    follow: Annotated[bool, typer.Option(help="Fetch versions before anybody asks.")] = True,
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """One cluster's cache of weights from elsewhere: every byte crosses the WAN once."""
    from rose.claims import claim
    from rose.transfer.relay import Relay
    from rose.transfer.store import StoreError
    from rose.transfer.store.files import FileStore

    if most_gb is not None and not 0 < most_gb < math.inf:
        fail(f"--most-gb is {most_gb:g}: it must be a finite number above 0")
    most_bytes = None if most_gb is None else int(most_gb * 1e9)
    sources = {name: _open(upstream, name, published=False) for name in job}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claimed = claim(folder / "relay.lock")
        relays = {
            n: Relay(one, folder, most_bytes=most_bytes, follows=follow)
            for n, one in sources.items()
        }
    except BlockingIOError:
        fail(f"--folder {folder} is another relay's")
    except OSError as error:
        fail(f"--folder {folder}: {error.strerror}")
    kept = {name: FileStore(folder, name) for name in relays}
    known = {name: store.steps() for name, store in kept.items()}

    def of(name: str) -> Relay:
        if name not in relays:
            raise StoreError(f"job {name} is not passed on here")
        return relays[name]

    what = f"{', '.join(relays)} of {upstream}"
    serving = _serving(what, of, listen, certificate, key)
    with claimed, serving, ExitStack() as open_, suppress(KeyboardInterrupt):
        for one in relays.values():
            open_.callback(one.close)
        while True:
            for name, one in relays.items():
                try:
                    if follow:
                        one.steps()
                    known[name] = _tell_of_new(kept[name], known[name])
                except (StoreError, OSError) as error:
                    log.warning("job %s: %s", name, error)
            time.sleep(FOLLOW_S)


@weights_app.command()
def serve(
    folder: Annotated[Path, typer.Argument(help="Where a trainer publishes: the jobs are in it.")],
    listen: Listen = "127.0.0.1:7400",
    writable: Annotated[bool, typer.Option(help="Let trainers elsewhere publish here.")] = False,
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """Serve a folder of published weights to relays and engines elsewhere."""
    if not folder.is_dir():
        fail(f"FOLDER {folder} is not a folder")
    of = _jobs(folder, writable)
    with _serving(str(folder), of, listen, certificate, key, writable), suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def _jobs(folder: Path, writable: bool) -> Callable[[str], FileStore]:
    """One store per job, however many connections ask: it holds the claims of publishers."""
    from rose.transfer.store import StoreError
    from rose.transfer.store.files import FileStore

    stores: dict[str, FileStore] = {}
    lock = threading.Lock()

    def of(job: str) -> FileStore:
        with lock:
            if job not in stores:
                if not writable and not (folder / job).is_dir():
                    raise StoreError(f"there is no job {job} here")
                stores[job] = FileStore(folder, job)
            return stores[job]

    return of


@contextmanager
def _serving(
    what: str,
    stores: Callable[[str], Served],
    listen: str,
    certificate: Path | None,
    key: Path | None,
    writable: bool = False,
) -> Iterator[None]:
    from rose.transfer.store import SECRET
    from rose.transfer.store.server import Server

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        fail(f"--listen {listen!r} is not HOST:PORT")
    tls, secret = _tls(certificate, key), os.environ.get(SECRET, "")
    try:
        server = Server(stores, (host, int(port)), secret=secret, tls=tls, writable=writable)
    except ValueError as error:
        fail(f"--listen {listen}: {error}, set {SECRET}")
    except OSError as error:
        fail(f"--listen {listen}: {error.strerror}")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    with closing(server):
        host, at = server.address
        typer.echo(f"serving {what} on {'tls' if tls else 'tcp'}://{host}:{at}")
        yield


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        fail("--certificate and --key go together: give both or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        fail(f"--certificate {certificate} and --key {key}: {error.strerror}")
    return context


def _tell_of_new(store: FileStore, known: dict[Step, int]) -> dict[Step, int]:
    steps = store.steps()
    for step, stored in steps.items():
        if step not in known:
            log.info("job %s: version %d arrived, %d bytes", store.job, step.version, stored)
    return steps


# ---- looking


@weights_app.command("ls")
def list_steps(url: Url, job: Job, as_json: Json = False) -> None:
    """All steps of a job that a store has."""
    from rose.transfer.inspect import survey
    from rose.transfer.manifest import Step
    from rose.transfer.route import route

    with _plainly():
        found = survey(_open(url, job))
    steps = {Step(one.base, one.version): one.bytes for one in found}
    way, total = route(steps, None), sum(steps.values())
    newest = way[-1].version if way else None
    if as_json:
        rows = [asdict(one) for one in found]
        _print_json({"job": job, "steps": rows, "bytes": total, "newest": newest})
        return
    _print_table(found, "version", "base", "bytes", "density", "ranks")
    reached = "no version can be reached" if newest is None else f"newest version {newest}"
    typer.echo(f"{len(found)} steps, {total:,} bytes, {reached}")


@weights_app.command()
def show(
    url: Url,
    job: Job,
    version: Annotated[int | None, typer.Argument(help="The newest by default.")] = None,
    as_json: Json = False,
) -> None:
    """What a version changed, tensor by tensor."""
    from rose.transfer.inspect import contents, named

    with _plainly():
        store = _open(url, job)
        steps = store.steps()
        step = _step_to(version, list(steps), job)
        with _bar(f"reading version {step.version}", steps[step]) as read:
            found = contents(store, step, read)
    if as_json:
        rows = [asdict(one) for one in found]
        _print_json({"job": job, **step._asdict(), "bytes": steps[step], "tensors": rows})
        return
    _print_table(found, *TENSOR)
    typer.echo(f"{named(step)}, {steps[step]:,} bytes")


@weights_app.command()
def verify(url: Url, job: Job) -> None:
    """Read and check all that a store has of a job; needs room for two copies in $TMPDIR."""
    from rose.transfer.inspect import Verification

    with _plainly():
        store = _open(url, job)
        steps = store.steps()
        total = sum(steps.values())
        with (
            tempfile.TemporaryDirectory(prefix="rose-verify-") as folder,
            _bar("verifying", total) as read,
        ):
            verification = Verification(store, steps, Path(folder), read)
            damage = list(verification.damage())
    for line in damage:
        typer.echo(line)
    if damage:
        raise typer.Exit(1)
    typer.echo(f"{len(steps)} steps, {total:,} bytes, all good")
    if verification.alone:
        typer.echo(f"{verification.alone} of them not applied: the versions before are not here")


@weights_app.command("diff")
def compare_checkpoints(
    old: Annotated[Path, typer.Argument(help="A folder of safetensors, or one file.")],
    new: Annotated[Path, typer.Argument(help="The same, later.")],
    wire: Annotated[str, typer.Option(help="What wider floats are sent as.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """How much of two checkpoints differs, bit by bit, and what sending it would cost."""
    from rose.transfer.checkpoints import Checkpoint, Total, compare
    from rose.transfer.manifest import WIDTHS

    floats = [name for name in WIDTHS if "float" in name]
    if wire not in floats:
        fail(f"--wire {wire!r} is unknown: choose from {', '.join(floats)}")
    with _plainly():
        try:
            before, after = Checkpoint(old), Checkpoint(new)
            elements = sum(map(math.prod, after.shapes().values()))
            with _bar("comparing", elements) as read:
                found = list(compare(before, after, wire, read))
        except (TypeError, ValueError) as error:
            fail(error)
    total = Total.of(found)
    if as_json:
        rows = [asdict(one) for one in found]
        _print_json({"wire": wire, "tensors": rows, "total": asdict(total)})
        return
    _print_table(found, *TENSOR)
    typer.echo(total)


def _open(url: str, job: str, *, published: bool = True) -> Store:
    """Makes no folder that is not there; of a job that has published, its own must be."""
    from rose.transfer.store import open_store

    try:
        folder = Path(urlsplit(url).path) / (job if published else "")
        if url.startswith("file:///") and not folder.is_dir():
            fail(f"store {url}: there is no folder {folder}")
        return open_store(url, job)
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"store {url}: {error.strerror}")


def _step_to(version: int | None, steps: list[Step], job: str) -> Step:
    """The shortest, which a store lists last."""
    if not steps:
        fail(f"job {job} has no version yet")
    if not (found := [one for one in steps if version in (None, one.version)]):
        fail(f"VERSION {version} is not there: {steps[0].version} to {steps[-1].version} are")
    return found[-1]


@contextmanager
def _plainly() -> Iterator[None]:
    """What a store says, and an interruption, as one sentence."""
    from rose.transfer.errors import TransferError
    from rose.transfer.store import StoreError

    try:
        yield
    except (StoreError, TransferError) as error:
        fail(error)
    except KeyboardInterrupt:
        typer.echo("rose: stopped before the end", err=True)
        raise typer.Exit(130) from None


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    with Progress(
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        disable=not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def _print_json(found: object) -> None:
    typer.echo(json.dumps(found, indent=2))


def _print_table(found: Sequence[StepFacts | TensorFacts], *fields: str) -> None:
    table = Table()
    for field in fields:
        left = field in ("name", "dtype", "shape")
        table.add_column(field, justify="left" if left else "right", overflow="fold")
    for one in found:
        table.add_row(*(Text(_cell(field, getattr(one, field))) for field in fields))
    Console(width=None if sys.stdout.isatty() else PIPED).print(table)


def _cell(field: str, value: object) -> str:
    match field:
        case "density":
            return f"{value:.4%}"
        case "bytes" | "changed":
            return f"{value:,}"
    return "anchor" if value is None else str(value)
