"""The routes, for the one job or for many under `/jobs/NAME/`."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from rose.scheduler.facts import PLACES
from rose.scheduler.frontdoor import control, splitting, texts
from rose.scheduler.frontdoor.errors import END, Wrong, answer, event, json, read
from rose.scheduler.frontdoor.events import Events
from rose.scheduler.frontdoor.exchange import Exchange, Left, exchange, first_of
from rose.scheduler.lease import Word
from rose.scheduler.service import Service
from rose.scheduler.status import Exported, describe
from rose.scheduler.turn import Turn

log = logging.getLogger("rose.scheduler")
Handler = Callable[[Request], Awaitable[Response]]
CLIENT_LEFT = 499
"""As nginx has it; nobody reads it."""


def application(service: Service, default_job: str) -> Starlette:
    door = Door(service, default_job)
    routes = door.routes()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.running():
            yield

    return Starlette(routes=[*routes, Mount("/jobs/{job}", routes=routes)], lifespan=lifespan)


class Report(msgspec.Struct):
    """Of a node."""

    node: str
    engine: str
    active: bool
    offered: bool
    dedicated: bool
    load: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    memory: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    places: Annotated[int, msgspec.Meta(ge=1)] = PLACES
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    """It has nothing else to say for so long: an order that comes up meanwhile is told at once."""


class Door:
    def __init__(self, service: Service, default_job: str) -> None:
        self._service = service
        self._default_job = default_job
        self._control = control.Control(service)
        self._exported = Exported(service.core, service.nodes)

    def routes(self) -> list[Route]:
        found = [
            Route("/inference/v1/generate", self._safely(self.generate), methods=["POST"]),
            Route("/v1/completions", self._safely(self._text(texts.COMPLETIONS)), methods=["POST"]),
            Route("/v1/chat/completions", self._safely(self._text(texts.CHAT)), methods=["POST"]),
            Route("/health", self._safely(self.health)),
            Route("/metrics", self._safely(self.metrics)),
            Route("/rose/v1/status", self._safely(self.status)),
            Route("/rose/v1/nodes", self._safely(self.report), methods=["POST"]),
            Route("/get_world_size", self._safely(self._of_job(self._control.world_size))),
            Route("/weight_info", self._safely(self._of_job(self._control.weight_info))),
            Route("/abort_requests", self._safely(self.abort), methods=["POST"]),
        ]
        for name in control.TO_ALL:
            told = self._told(self._control.to_all, name)
            found.append(Route(f"/{name}", self._safely(told), methods=["POST"]))
        for name in control.FROM_ONE:
            told = self._told(self._control.from_one, name)
            found.append(Route(f"/{name}", self._safely(told)))
        return found

    # ---- turns

    async def generate(self, request: Request) -> Response:
        body = await read(request)
        job = self._job(request)
        asked = splitting.parse(body)
        going = Exchange(self._service, request, job)
        async with exchange(going):
            room = await self._room(going)
            asks = splitting.split(asked, body, job, going.id, 0, going.trajectory, room)
            turns = going.begin(asks)
            if asked.stream:
                return Events(going, self._generated(going))
            await going.finish()
        return json(splitting.join(going.id, turns, with_prompt=bool(asked.return_token_ids)))

    async def _room(self, going: Exchange) -> int:
        """Tokens of the model's context."""
        if going.job in self._service.contexts:
            return self._service.contexts[going.job]
        return await going.listened(self._service.context(going.job))

    async def _generated(self, going: Exchange) -> AsyncIterator[bytes]:
        async for index, turn, before, over in going.stream():
            part = splitting.part(index, turn, before, over=over)
            yield event({"request_id": going.id, "output_mode": "tokens", "choices": [part]})
        yield END

    def _text(self, route: texts.Route) -> Handler:
        async def handle(request: Request) -> Response:
            body = await read(request)
            job = self._job(request)
            going = Exchange(self._service, request, job)
            async with exchange(going):
                rendered = await going.listened(route.render(self._service, job, body))
                room = await self._room(going)
                asks = [
                    splitting.split(
                        splitting.parse(one),
                        one,
                        job,
                        going.id,
                        number,
                        going.trajectory,
                        room,
                        texts.UNSAID_TOKENS,
                    )
                    for number, one in enumerate(rendered)
                ]
                taken = iter(going.begin([ask for of_prompt in asks for ask in of_prompt]))
                prompts: list[list[Turn]] = [[next(taken) for _ in of_prompt] for of_prompt in asks]
                if body.get("stream"):
                    return Events(going, texts.stream(route, going, body, prompts))
                await going.finish()
                return json(await route.derender(going, body, prompts))

        return handle

    async def abort(self, request: Request) -> Response:
        """Their clients get what there is, as from vLLM."""
        ids, job = (await read(request)).get("request_ids"), self._job(request)
        if not isinstance(ids, list):
            raise Wrong(400, "request_ids is not a list")
        requests = {f"{job}/{id_}" for id_ in ids}
        for turn in list(self._service.core.turns.values()):
            if turn.ask.id.rpartition("/")[0] in requests:
                self._service.cancel(turn)
        return json({})

    # ---- the rest

    async def health(self, request: Request) -> Response:
        """The front door itself: without engines turns wait, which is not ill health."""
        if self._service.ledger.failed:
            return answer(503, self._service.ledger.failed, "ServiceUnavailableError")
        return Response()

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._exported.registry), media_type=CONTENT_TYPE_LATEST)

    async def status(self, request: Request) -> Response:
        return json(describe(self._service.core, self._service.nodes))

    async def report(self, request: Request) -> Response:
        """A node says how it is, and is told what to do."""
        try:
            said = msgspec.convert(await read(request), Report)
        except msgspec.ValidationError as error:
            raise Wrong(400, str(error)) from error
        if not said.engine.startswith(("http://", "https://")):
            raise Wrong(400, f"engine {said.engine} is not a URL")
        until = time.monotonic() + said.wait_s
        while True:
            now = time.monotonic()
            word = Word(now, said.active, said.offered, said.load, said.memory)
            node, order = self._service.nodes.heard(
                said.node, said.engine.rstrip("/"), dedicated=said.dedicated, word=word,
                places=said.places,
            )  # fmt: skip
            self._service.kick()
            if order is not None or now >= until or self._service.stopping.is_set():
                return json({"order": order, "lease": node.lease.phase})
            await first_of([self._service.reshuffled, self._service.stopping], until - now)

    def _job(self, request: Request) -> str:
        name = str(request.path_params.get("job", self._default_job))
        if name not in self._service.core.jobs:
            raise Wrong(404, f"there is no job {name}", "NotFoundError")
        return name

    def _of_job(self, act: Callable[[str], Awaitable[Response]]) -> Handler:
        async def handle(request: Request) -> Response:
            return await act(self._job(request))

        return handle

    def _told(self, act: Callable[[Request, str, str], Awaitable[Response]], name: str) -> Handler:
        async def handle(request: Request) -> Response:
            return await act(request, self._job(request), name)

        return handle

    def _safely(self, handle: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            began = time.monotonic()
            try:
                answered = await handle(request)
            except Wrong as error:
                answered = answer(error.status, str(error), error.kind)
            except (Left, ClientDisconnect):
                answered = Response(status_code=CLIENT_LEFT)
            route = request.scope["route"].path
            seconds = self._exported.seconds.labels(route, answered.status_code)
            seconds.observe(time.monotonic() - began)
            return answered

        return guarded
