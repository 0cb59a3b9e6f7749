"""A fake OpenAI server at the process border, scripted per request."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web


def next_token(context: list[int]) -> int:
    """The fake model: depends on every token before, so that a wrong resume shows."""
    state = 7
    for token in context:
        state = (state * 31 + token) % 1_000_003
    return state % 200 + 5


def greedy(context: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(next_token(context + made))
    return made


@dataclass(frozen=True)
class RequestScript:
    """How one request goes wrong; the default goes right."""

    stall_s: float = 0.0
    hold_until: int = 0
    """Answer only when this many requests have arrived."""
    status: int = 200
    abort_after: int | None = None
    break_after: int | None = None
    error_after: int | None = None
    stop_reason: str | None = None


@dataclass
class FakeServer:
    """Streams `greedy` tokens. Scripts apply to requests in order; one-token probes take none."""

    scripts: list[RequestScript] = field(default_factory=list)
    per_chunk: int = 1
    token_s: float = 0.0
    takes_extras: bool = True
    gives_ids: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    url: str = ""
    greedy = staticmethod(greedy)
    Script = RequestScript

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        """Every prompt counts, and half of it was known."""
        looked_up = sum(len(body["prompt"]) for body in self.bodies)
        return web.Response(
            text=f'vllm:prefix_cache_queries_total{{engine="0"}} {looked_up}.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {looked_up / 2}\n'
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not self.takes_extras and {"ignore_eos", "stream_options"} & set(body):
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        script = RequestScript()
        if body["max_tokens"] > 1 or body.get("return_token_ids"):
            self.bodies.append(body)
            if self.scripts:
                script = self.scripts.pop(0)
        await asyncio.sleep(script.stall_s)
        async with self.arrived:
            self.arrived.notify_all()
            await self.arrived.wait_for(lambda: len(self.bodies) >= script.hold_until)
        if script.status != 200:
            return web.json_response({"error": {"message": "scripted"}}, status=script.status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await self.stream(request, answer, body, script)
        return answer

    async def stream(
        self,
        request: web.Request,
        answer: web.StreamResponse,
        body: dict[str, Any],
        script: RequestScript,
    ) -> None:
        async def send(event: dict[str, Any]) -> None:
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        prompt = body["prompt"] if isinstance(body["prompt"], list) else [1]
        tokens = greedy(prompt, body["max_tokens"])
        cuts = [n for n in (script.abort_after, script.break_after, script.error_after) if n]
        ends = bool(cuts) or script.abort_after == 0
        shown = tokens[: min(cuts, default=0)] if ends else tokens
        for at in range(0, len(shown), self.per_chunk):
            piece = shown[at : at + self.per_chunk]
            choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": None}
            if body.get("return_token_ids") and self.gives_ids:
                choice["token_ids"] = piece
            last = at + len(piece) == len(tokens)
            choice["finish_reason"] = "length" if last else None
            event: dict[str, Any] = {"choices": [choice]}
            options = body.get("stream_options") or {}
            if options.get("continuous_usage_stats"):
                event["usage"] = {"completion_tokens": at + len(piece)}
            await send(event)
            await asyncio.sleep(self.token_s)
        if script.break_after is not None:
            assert request.transport is not None
            request.transport.abort()
            return
        if script.error_after is not None:
            await send({"error": {"message": "scripted failure"}})
        if script.abort_after is not None:
            end = {"text": "", "finish_reason": "abort", "stop_reason": script.stop_reason}
            await send({"choices": [end | {"token_ids": []}]})
        await answer.write(b"data: [DONE]\n\n")


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_get("/metrics", server.metrics)
        app.router.add_post("/v1/completions", server.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture(params=["fake", pytest.param("real", marks=[pytest.mark.engine, pytest.mark.node])])
def openai_url(request: pytest.FixtureRequest) -> str:
    """The fake, and the real serving engine."""
    if request.param == "fake":
        return str(request.getfixturevalue("fake_server").url)
    return str(request.getfixturevalue("node").serving_url)
