"""What our HTTP services share: a secret at the door, and signals that are the caller's."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


class Guard:
    """Lets in who knows the secret; others get `refusal`. Routes that end with one of `free` are
    for all."""

    def __init__(
        self, app: ASGIApp, secret: str, refusal: Response, free: tuple[str, ...] = ()
    ) -> None:
        self._app = app
        self._free = free
        self._secret = secret.encode()
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].endswith(self._free):
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self._secret):
                await self._refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Server(uvicorn.Server):
    """uvicorn would raise signals again before what it serves has been stopped."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
