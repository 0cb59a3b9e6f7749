"""The node's HTTP API: loopback by default, a shared secret anywhere else."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import uvicorn
from aiohttp import ClientError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rose.cluster import metrics
from rose.cluster.config import ConfigError, NodeConfig
from rose.cluster.custody import Overtaken, TakenBack
from rose.cluster.engine import bound
from rose.cluster.node import Node
from rose.cluster.reporting import report
from rose.executor.slo import Slo
from rose.web import Guard, Server

log = logging.getLogger("rose.node")


class _SloBody(msgspec.Struct, forbid_unknown_fields=True):
    ttft_ms: float
    tpot_ms: float


def application(node: Node) -> Starlette:
    exported = metrics.registry(node)

    async def health(_: Request) -> Response:
        engines = {e.role: await e.healthy(node.session) for e in (node.serving, node.rollout) if e}
        good = node.ready and all(engines.values())
        return JSONResponse({"ok": good, "engines": engines}, 200 if good else 503)

    async def status(_: Request) -> Response:
        return JSONResponse(node.status())

    async def page(_: Request) -> Response:
        return Response(json.dumps(node.page.describe()), media_type="application/json")

    async def scrape(_: Request) -> Response:
        return Response(generate_latest(exported), media_type=CONTENT_TYPE_LATEST)

    async def slo(request: Request) -> Response:
        try:
            wanted = msgspec.convert(await request.json(), _SloBody)
            node.promise(Slo(wanted.ttft_ms / 1e3, wanted.tpot_ms / 1e3))
        except (ValueError, ConfigError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse(node.status())

    def order(act: Callable[[], Awaitable[float]]) -> Callable[[Request], Awaitable[Response]]:
        async def carry_out(_: Request) -> Response:
            try:
                seconds = await act()
            except TimeoutError as error:
                return JSONResponse({"error": str(error), **node.status()}, 504)
            except (TakenBack, Overtaken) as error:
                return JSONResponse({"error": str(error), **node.status()}, 409)
            except (ConfigError, ClientError) as error:
                return JSONResponse({"error": str(error), **node.status()}, 502)
            return JSONResponse({"seconds": seconds, **node.status()})

        return carry_out

    routes = [
        Route("/health", health),
        Route("/status", status),
        Route("/page", page),
        Route("/metrics", scrape),
        Route("/slo", slo, methods=["POST"]),
        Route("/activate", order(node.lend), methods=["POST"]),
        Route("/drain", order(node.drain), methods=["POST"]),
        Route("/revoke", order(node.take_back), methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    if secret := node.config.secret:
        refusal = JSONResponse({"error": "missing or wrong secret"}, 401)
        app.add_middleware(Guard, secret=secret, refusal=refusal)
    return app


@asynccontextmanager
async def running(
    config: NodeConfig, kind: Callable[[NodeConfig], Node] = Node
) -> AsyncIterator[Node]:
    """A node with its engines and its API, all stopped on the way out whatever happens."""
    with bound(config.port, "port", config.host) as listener:
        node = kind(config)
        await node.start()
        try:
            # Old connections of a node that was killed must not keep the port from the next one.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server = Server(uvicorn.Config(application(node), log_level="warning"))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            node.url = f"http://{config.host}:{listener.getsockname()[1]}"
            reporting = None
            if config.scheduler is not None:
                said = report(node, config.scheduler, config.scheduler_secret or "")
                reporting = asyncio.create_task(said)
            try:
                yield node
            finally:
                if reporting is not None:
                    reporting.cancel()
                server.should_exit = True
                await serving
        finally:
            await node.stop()


async def run_until_signal(config: NodeConfig) -> None:
    """`rose node`: run until SIGINT or SIGTERM, also while still starting."""
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()
    assert me is not None
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, me.cancel)
    with suppress(asyncio.CancelledError):
        async with running(config) as node:
            log.info("listening", extra={"facts": {"url": node.url}})
            await asyncio.Event().wait()
