"""An engine without a model: the routes of vLLM that the scheduler uses, with made-up tokens.

Tokens are a function of the tokens before them, so an answer that was cut and resumed anywhere can
be told from a wrong one. Timing follows a line, as a real engine's does: a step takes `step_s` and
`turn_s` for each turn in it, a prompt token that is not cached `prefill_s`. Run as
`python -m rose.bench.emulated PORT`; `POST /emulate {"revoked": true}` and the like disturb it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import uvicorn
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
STOPS = 97
"""One in so many tokens ends a turn that may end by itself."""


def next_token(tokens: Sequence[int]) -> int:
    """Of all before it; cheaply, of the last few and how many there are."""
    tail = ",".join(map(str, tokens[-8:]))
    return int(xxhash.xxh3_64_intdigest(f"{len(tokens)}:{tail}".encode()) % VOCABULARY)


def answer_to(prompt: Sequence[int], most: int, *, ignore_eos: bool) -> tuple[list[int], str]:
    """What an undisturbed engine says, and why it ends."""
    tokens = list(prompt)
    for _ in range(most):
        token = next_token(tokens)
        tokens.append(token)
        if not ignore_eos and token % STOPS == 0:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class Emulated:
    def __init__(self, speed: Speed = Speed()) -> None:  # noqa: B008 (frozen)
        self.speed = speed
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
        self._prefixes.hold("", names, CAPACITY)
        tokens, finish = answer_to(
            prompt, sampling.get("max_tokens", 16), ignore_eos=bool(sampling.get("ignore_eos"))
        )
        self.running += 1
        self.served += 1
        try:
            async with self._computing:
                await asyncio.sleep((len(prompt) - cached) * self.speed.prefill_s)
            for number, token in enumerate(tokens):
                await self.free.wait()
                await asyncio.sleep(self.speed.token_s(self.running))
                if self.revoked:
                    yield _event([], "abort", "rose:revoked")
                    break
                last = number == len(tokens) - 1
                spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
                yield _event(
                    [token],
                    finish if last else None,
                    logprobs=sampling.get("logprobs") is not None,
                    spans=spans if last else None,
                )
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            yield b"data: " + msgspec.json.encode({"choices": [], "usage": usage}) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1

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

    async def weight_info(self, _: Request) -> Response:
        return _json({"weight_version": self.version})

    async def finish_update(self, request: Request) -> Response:
        self.version = str(msgspec.json.decode(await request.body()).get("weight_version"))
        return _json({})

    async def done(self, _: Request) -> Response:
        return _json({})

    async def emulate(self, request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body())
        self.revoked = wanted.get("revoked", self.revoked)
        if (stuck := wanted.get("stuck")) is not None:
            (self.free.clear if stuck else self.free.set)()
        return _json({"running": self.running, "served": self.served})

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/v1/completions/render", self.render, methods=["POST"]),
                Route("/v1/completions/derender", self.derender, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/weight_info", self.weight_info),
                Route("/finish_weight_update", self.finish_update, methods=["POST"]),
                *(Route(f"/{name}", self.done, methods=["POST"]) for name in ("pause", "resume")),
                Route("/health", self.done),
                Route("/emulate", self.emulate, methods=["POST"]),
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


if __name__ == "__main__":
    uvicorn.run(Emulated().application(), port=int(sys.argv[1]), log_level="warning")
