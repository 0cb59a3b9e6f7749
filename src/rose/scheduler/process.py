"""The scheduler's process: settings, server, signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from rose.logs import log_as_json
from rose.net import tcp_socket
from rose.scheduler.core import Rules, Scheduler
from rose.scheduler.fleet import Engine
from rose.scheduler.frontdoor.app import application
from rose.scheduler.frontdoor.errors import answer
from rose.scheduler.jobspec import JobSpec
from rose.scheduler.ledger import Ledger
from rose.scheduler.provisioner import KEEP_S
from rose.scheduler.service import Service
from rose.web import Guard, Server

YOUNG = 50_000
"""Objects made before the collector looks at the youngest: thousands of turns are many objects that
live long, and looking at them all every moment holds up everybody."""
LEAVE_S = 1
"""Clients that wait when we are stopped: their turns are in the ledger, they may ask again."""


@dataclass(frozen=True)
class Settings:
    engines: tuple[str, ...]
    ledger: Path
    jobs: tuple[JobSpec, ...] = (JobSpec("default"),)
    host: str = "127.0.0.1"
    port: int = 0
    placement: str = "cost"
    order: str = "longest_first"
    stall_s: float = 2.0
    most_waiting: int = 10_000
    grace_s: float = 30.0
    most_borrowed: int = 1000
    keep_s: float = KEEP_S
    secret: str = ""
    verbose: bool = False


def service(settings: Settings) -> Service:
    rules = Rules(settings.placement, settings.order, settings.stall_s, settings.most_waiting)
    core = Scheduler(rules)
    for spec in settings.jobs:
        core.jobs[spec.name] = spec.job
    for url in settings.engines:
        core.join(Engine(url, url), 0.0)
    made = Service(
        core,
        Ledger(settings.ledger),
        grace_s=settings.grace_s,
        most_borrowed=settings.most_borrowed,
        keep_s=settings.keep_s,
    )
    for spec in settings.jobs:
        if spec.source is not None:
            made.leader.watch(spec.name, spec.source)
    return made


async def run(settings: Settings) -> None:
    """Until SIGINT or SIGTERM: turns that run are kept in the ledger."""
    log_as_json(logging.DEBUG if settings.verbose else logging.INFO)
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 50)
    scheduling = service(settings)
    app: ASGIApp = application(scheduling, settings.jobs[0].name)
    if settings.secret:
        refusal = answer(401, "missing or wrong secret", "UnauthorizedError")
        app = Guard(app, settings.secret, refusal, free=("/health",))  # as with vLLM's own key
    with tcp_socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise OSError(f"--listen {settings.host}:{settings.port}: {error.strerror}") from error
        listener.listen(2048)
        print(f"scheduling on http://{settings.host}:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=LEAVE_S)
        server = Server(config)

        def leave(number: int) -> None:
            scheduling.stopping.set()
            server.handle_exit(number, None)

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, leave, number)
        await server.serve(sockets=[listener])
