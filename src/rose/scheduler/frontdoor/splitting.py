"""One request for several answers becomes turns, and their results its choices again.

Fields are as on vLLM's `/inference/v1/generate`: what the other routes ask is first rendered to
that by an engine.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import xxhash

from rose.scheduler.frontdoor.errors import Wrong
from rose.scheduler.turn import Ask, Span, Turn

MOST_SAMPLES = 1024
OURS = ("request_id", "token_ids", "sampling_params", "stream", "stream_options", "cache_salt")
"""Fields that every attempt gets anew; others are passed on as they came."""


Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Generate(msgspec.Struct, kw_only=True):
    """What is looked at of a request; engines look at the rest."""

    token_ids: list[Token]
    sampling_params: dict[str, Any] = {}
    stream: bool | None = False
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    model: str | None = None


def parse(body: dict[str, Any]) -> Generate:
    try:
        asked = msgspec.convert(body, Generate)
    except msgspec.ValidationError as error:
        raise Wrong(400, str(error)) from error
    if not asked.token_ids:
        raise Wrong(400, "token_ids is empty")
    for name in ("n", "max_tokens", "min_tokens"):
        value = asked.sampling_params.get(name)
        if value is not None and (not isinstance(value, int) or value < (name != "min_tokens")):
            raise Wrong(400, f"sampling_params.{name} is {value!r}")
    if (asked.sampling_params.get("n") or 1) > MOST_SAMPLES:
        raise Wrong(400, f"sampling_params.n is over {MOST_SAMPLES}")
    if asked.sampling_params.get("prompt_logprobs") is not None:
        raise Wrong(400, "prompt_logprobs is not answered here: ask an engine (`rose ps` has them)")
    return asked


def split(
    asked: Generate,
    body: dict[str, Any],
    job: str,
    request: str,
    number: int,
    trajectory: str,
    room: int,
    most: int | None = None,
) -> list[Ask]:
    """The turns of one prompt, the `number`th of its request. `room` is the model's context,
    `most` what `max_tokens` is if it is not said: all that is left if None."""
    sampling = dict(asked.sampling_params)
    samples = sampling.pop("n", None) or 1
    seed = sampling.pop("seed", None)
    if seed is None:
        seed = xxhash.xxh3_64_intdigest(request.encode()) >> 2
    limit = sampling.pop("max_tokens", most)
    left = room - len(asked.token_ids)
    if left < 1:
        raise Wrong(
            400,
            f"the prompt has {len(asked.token_ids)} tokens, the model's context is {room}",
        )
    group = f"{xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(asked.token_ids)):x}"
    extra = {name: value for name, value in body.items() if name not in OURS}
    if asked.cache_salt:
        extra["cache_salt"] = asked.cache_salt
    return [
        Ask(
            id=f"{request}/{number}.{sample}",
            job=job,
            prompt=asked.token_ids,
            max_tokens=min(limit, left) if limit else left,
            sampling=sampling,
            seed=derive(seed, number, sample),
            trajectory=trajectory and f"{trajectory}/{number}.{sample}",
            group=group,
            last=bool((sampling.get("extra_args") or {}).get("rose_last_turn")),
            extra=extra,
        )
        for sample in range(samples)
    ]


def derive(seed: int, number: int, sample: int) -> int:
    """A turn's own seed; the first one has the request's."""
    if not number and not sample:
        return seed
    return xxhash.xxh3_64_intdigest(f"{seed}/{number}.{sample}".encode()) >> 2


def join(request: str, turns: list[Turn], *, with_prompt: bool) -> dict[str, Any]:
    """The answer for one prompt, as of `/inference/v1/generate`."""
    prompt = turns[0].ask.prompt
    made = sum(len(turn.tokens) for turn in turns)
    return {
        "request_id": request,
        "created": int(time.time()),
        "output_mode": "tokens",
        "choices": [choice(index, turn) for index, turn in enumerate(turns)],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": made,
            "total_tokens": len(prompt) + made,
        },
        **({"prompt_token_ids": prompt} if with_prompt else {}),
    }


def choice(index: int, turn: Turn) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": turn.tokens,
        "logprobs": {"content": turn.logprobs} if turn.logprobs else None,
        "finish_reason": turn.finish,
        "stop_reason": turn.stop,
        "weight_versions": versions(turn.spans, len(turn.tokens)),
    }


def part(index: int, turn: Turn, before: int, *, over: bool) -> dict[str, Any]:
    """What has come of a turn since it had so many tokens."""
    return choice(index, turn) | {
        "token_ids": turn.tokens[before:],
        "logprobs": {"content": turn.logprobs[before:]} if turn.logprobs else None,
        "finish_reason": turn.finish if over else None,
        "weight_versions": versions(turn.spans, len(turn.tokens)) if over else None,
    }


def versions(spans: list[Span], tokens: int) -> list[dict[str, Any]]:
    ends = [*(span.start for span in spans[1:]), tokens]
    return [
        {"version": span.version, "start": span.start, "end": end}
        for span, end in zip(spans, ends, strict=True)
    ]
