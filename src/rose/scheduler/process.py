"""The scheduler's process: settings, server, signals."""

from __future__ import annotations

import hmac
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from rose.scheduler.core import Job, Rules, Scheduler
from rose.scheduler.fleet import Engine
from rose.scheduler.frontdoor.app import application
from rose.scheduler.frontdoor.errors import answer
from rose.scheduler.ledger import Ledger
from rose.scheduler.service import Service


@dataclass(frozen=True)
class Settings:
    engines: tuple[str, ...]
    ledger: Path
    jobs: tuple[str, ...] = ("default",)
    host: str = "127.0.0.1"
    port: int = 0
    placement: str = "cost"
    order: str = "longest_first"
    stall_s: float = 2.0
    most_waiting: int = 10_000
    grace_s: float = 30.0
    most_borrowed: int = 1000
    secret: str = ""


def service(settings: Settings) -> Service:
    rules = Rules(settings.placement, settings.order, settings.stall_s, settings.most_waiting)
    core = Scheduler(rules)
    for name in settings.jobs:
        core.jobs[name] = Job(name)
    for url in settings.engines:
        core.join(Engine(url, url), 0.0)
    return Service(
        core,
        Ledger(settings.ledger),
        grace_s=settings.grace_s,
        most_borrowed=settings.most_borrowed,
    )


class _Guard:
    """Lets in who knows the secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self._secret):
                refusal = answer(401, "missing or wrong secret", "UnauthorizedError")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    """Ctrl-C is the caller's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(settings: Settings) -> None:
    """Until cancelled."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    app: ASGIApp = application(service(settings), settings.jobs[0])
    if settings.secret:
        app = _Guard(app, settings.secret)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise OSError(f"--listen {settings.host}:{settings.port}: {error.strerror}") from error
        listener.listen(2048)
        print(f"scheduling on http://{settings.host}:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        await _Server(config).serve(sockets=[listener])
