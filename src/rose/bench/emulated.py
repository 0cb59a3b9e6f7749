"""An engine without a model: the routes of vLLM that the scheduler uses, with made-up tokens.

Tokens are a function of the tokens before them, so an answer that was cut and resumed anywhere can
be told from a wrong one. Timing follows a line, as a real engine's does: a step takes `step_s` and
`turn_s` for each turn in it, a prompt token that is not cached `prefill_s`; memory for prefixes is
bounded. Run as `python -m rose.bench.emulated PORT...`, several engines in one process if there are
several ports. `POST /emulate {"revoked": true}` and the like set or disturb one, `GET /emulate`
tells what it has done.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import uvicorn
import uvloop
import xxhash
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rose.scheduler.facts import Speed
from rose.scheduler.prefixes import Prefixes, chain

VOCABULARY = 32_000
CONTEXT = 32_768
CAPACITY = 200_000
"""Tokens of prefixes that are kept."""
KV_TOKENS = 1 << 20
TAIL = 8
DONE = (
    "pause",
    "resume",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
)
"""What an engine without weights has done as soon as it is told."""
STOPS = 97
"""One in so many tokens ends a turn that may end by itself."""


def next_token(last: Sequence[int], count: int) -> int:
    """Of all before it; cheaply, of the last `TAIL` and how many there are."""
    tail = ",".join(map(str, last))
    return int(xxhash.xxh3_64_intdigest(f"{count}:{tail}".encode()) % VOCABULARY)


def answer_to(prompt: Sequence[int], most: int, *, ignore_eos: bool) -> tuple[list[int], str]:
    """What an undisturbed engine says, and why it ends."""
    tokens = list(prompt)
    for _ in range(most):
        token = next_token(tokens[-TAIL:], len(tokens))
        tokens.append(token)
        if not ignore_eos and token % STOPS == 0:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class Attempt(msgspec.Struct):
    """A request as the engine saw it."""

    seconds: float
    prompt: int
    cached: int
    whole: bool
    """All of its tokens were sent."""


class Settings(msgspec.Struct):
    """What `POST /emulate` can set; what is not said stays."""

    revoked: bool | None = None
    stuck: bool | None = None
    speed: Speed | None = None
    interval: int | None = None
    """Tokens per event, as vLLM's `--stream-interval`."""
    capacity: int | None = None
    """Tokens of prefixes that are kept."""


class Emulated:
    def __init__(self) -> None:
        self.speed = Speed()
        self.interval = 1
        self.capacity = CAPACITY
        self.attempts: dict[str, Attempt] = {}
        self.version = "0"
        self.revoked = False
        self.free = asyncio.Event()
        """Cleared while the engine hangs."""
        self.free.set()
        self.running = 0
        self.served = 0
        self._prefixes = Prefixes()
        self._computing = asyncio.Lock()

    async def generate(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        tokens = body["token_ids"]
        if any(not 0 <= token < VOCABULARY for token in tokens):
            return _refuse(400, "token_ids has a token outside the vocabulary")
        if len(tokens) >= CONTEXT:
            return _refuse(400, f"the prompt is longer than {CONTEXT} tokens")
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        prompt, sampling = body["token_ids"], body.get("sampling_params", {})
        names = chain(prompt, body.get("cache_salt") or "")
        cached = self._prefixes.cached(names).get("", 0)
        self._prefixes.hold("", names, self.capacity)
        tokens, finish = answer_to(
            prompt, sampling.get("max_tokens", 16), ignore_eos=bool(sampling.get("ignore_eos"))
        )
        self.running += 1
        self.served += 1
        began, whole = time.monotonic(), False
        try:
            async with self._computing:
                await asyncio.sleep((len(prompt) - cached) * self.speed.prefill_s)
            for sent in range(0, len(tokens), self.interval):
                part = tokens[sent : sent + self.interval]
                await self.free.wait()
                await asyncio.sleep(len(part) * self.speed.token_s(self.running))
                if self.revoked:
                    yield _event([], "abort", "rose:revoked")
                    break
                whole = sent + len(part) == len(tokens)
                spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
                yield _event(
                    part,
                    finish if whole else None,
                    logprobs=sampling.get("logprobs") is not None,
                    spans=spans if whole else None,
                )
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            yield b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1
            if id_ := body.get("request_id"):
                seconds = time.monotonic() - began
                self.attempts[id_] = Attempt(seconds, len(prompt), cached, whole)

    async def render(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        prompts = body.get("prompt")
        if not isinstance(prompts, list) or not prompts:
            return _refuse(400, "prompt must be token ids here")
        if isinstance(prompts[0], int):
            prompts = [prompts]
        names = ("n", "max_tokens", "temperature", "seed", "logprobs", "ignore_eos")
        sampling = {name: body[name] for name in names if body.get(name) is not None}
        return _json([{"token_ids": ids, "sampling_params": sampling} for ids in prompts])

    async def derender(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        if body.get("stream"):
            (part,) = body["generate_chunk"]["choices"]
            chunk = {"id": "", "object": "text_completion", "choices": [_texted(part)]}
            return _json({"chunk": chunk, "stream_state": {}})
        responses = body["generate_responses"]
        choices = [_texted(part) for one in responses for part in one["choices"]]
        made = sum(len(part["token_ids"]) for one in responses for part in one["choices"])
        read = sum(body["prompt_tokens"])
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return _json({"id": "", "object": "text_completion", "choices": choices, "usage": usage})

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [{"id": "emulated", "max_model_len": CONTEXT}]})

    async def metrics(self, _: Request) -> Response:
        size = f'block_size="16",num_gpu_blocks="{KV_TOKENS // 16}"'
        return Response(f"vllm:cache_config_info{{{size}}} 1.0\n", media_type="text/plain")

    async def weight_info(self, _: Request) -> Response:
        return _json({"weight_version": self.version})

    async def finish_update(self, request: Request) -> Response:
        self.version = str(msgspec.json.decode(await request.body()).get("weight_version"))
        return _json({})

    async def done(self, _: Request) -> Response:
        return _json({})

    async def emulate(self, request: Request) -> Response:
        """Set what is said; tell what was done since the last time anybody asked with GET."""
        if request.method == "GET":
            told, self.attempts = self.attempts, {}
            return _json(told)
        wanted = msgspec.json.decode(await request.body(), type=Settings)
        for name in ("revoked", "speed", "interval", "capacity"):
            if (value := getattr(wanted, name)) is not None:
                setattr(self, name, value)
        if wanted.revoked:
            self._prefixes = Prefixes()
        if wanted.stuck is not None:
            (self.free.clear if wanted.stuck else self.free.set)()
        return _json({"running": self.running, "served": self.served})

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/v1/completions/render", self.render, methods=["POST"]),
                Route("/v1/completions/derender", self.derender, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/weight_info", self.weight_info),
                Route("/metrics", self.metrics),
                Route("/finish_weight_update", self.finish_update, methods=["POST"]),
                *(Route(f"/{name}", self.done, methods=["POST"]) for name in DONE),
                Route("/health", self.done),
                Route("/emulate", self.emulate, methods=["GET", "POST"]),
            ]
        )


def _texted(part: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": part["index"],
        "text": "".join(f" {token}" for token in part["token_ids"]),
        "logprobs": part["logprobs"],
        "finish_reason": part["finish_reason"],
    }


def _event(
    tokens: list[int],
    finish: str | None,
    stop: str | None = None,
    *,
    logprobs: bool = False,
    spans: Any = None,
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "token_ids": tokens, "finish_reason": finish}
    choice |= {"stop_reason": stop, "weight_versions": spans}
    if logprobs:
        choice["logprobs"] = {"content": [{"token_id": t, "logprob": -t / 1e4} for t in tokens]}
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _refuse(status: int, message: str) -> Response:
    return _json({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)


async def serve(ports: Sequence[int]) -> None:
    configs = (uvicorn.Config(Emulated().application(), port=p, log_level="warning") for p in ports)
    await asyncio.gather(*(uvicorn.Server(config).serve() for config in configs))


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
