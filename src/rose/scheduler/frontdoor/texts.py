"""`/v1/completions` and `/v1/chat/completions`: an engine turns words into tokens, and back.

vLLM renders a request to what `/inference/v1/generate` takes (prompt templates, tokenising, checks,
defaults), and derenders tokens to the route's answer (text, log-probs, tool calls). So answers are
vLLM's own, and between the two there are only tokens, which can be resumed anywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rose.scheduler.frontdoor import splitting
from rose.scheduler.frontdoor.errors import END, Wrong, event
from rose.scheduler.frontdoor.exchange import Exchange
from rose.scheduler.service import Service
from rose.scheduler.turn import Turn

UNSAID_TOKENS = 16
"""vLLM's default; what it renders does not say defaults."""


class Route:
    """Of the two: where it is, and how requests and answers are wrapped."""

    def __init__(self, path: str, wrapped: str, *, many: bool) -> None:
        self.path = path
        self.wrapped = wrapped
        self._many = many

    async def render(
        self, service: Service, job: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """One request for tokens per prompt."""
        rendered = await ask(service, job, f"{self.path}/render", {**body, "stream": False})
        return list(rendered) if self._many else [rendered]

    async def derender(
        self, going: Exchange, body: dict[str, Any], prompts: list[list[Turn]]
    ) -> dict[str, Any]:
        """The route's answer to turns that are over, prompt by prompt."""
        joined = [splitting.join(going.id, turns, with_prompt=False) for turns in prompts]
        prompt_ids = [turns[0].ask.prompt for turns in prompts]
        counts = [len(ids) for ids in prompt_ids]
        if self._many:
            asked = {
                "generate_responses": joined,
                "prompt_tokens": counts,
                "prompt_token_ids": prompt_ids,
            }
        else:
            asked = {
                "generate_response": joined[0],
                "prompt_tokens": counts[0],
                "prompt_token_ids": prompt_ids[0],
            }
        asked |= {"model": body.get("model"), self.wrapped: {**body, "stream": False}}
        answer: dict[str, Any] = await ask(going.service, going.job, f"{self.path}/derender", asked)
        self._complete(answer, body, prompts)
        return answer

    def _complete(
        self, answer: dict[str, Any], body: dict[str, Any], prompts: list[list[Turn]]
    ) -> None:
        """What derendering leaves out."""
        turns = [turn for of_prompt in prompts for turn in of_prompt]
        for index, (choice, turn) in enumerate(zip(answer["choices"], turns, strict=True)):
            choice["index"] = index
            choice["weight_versions"] = splitting.versions(turn.spans, len(turn.tokens))
            choice["stop_reason"] = turn.stop
            if body.get("return_token_ids"):
                choice["token_ids"] = turn.tokens
                if self._many:
                    choice["prompt_token_ids"] = turn.ask.prompt
            if body.get("return_tokens_as_token_ids"):
                _name_by_ids(choice.get("logprobs"), turn.logprobs)
            _end_before(choice, turn, body)
        if body.get("return_token_ids") and not self._many:
            answer["prompt_token_ids"] = turns[0].ask.prompt


def _name_by_ids(logprobs: Any, entries: list[Any]) -> None:
    """Derendering knows tokens by their text only, which several may share."""
    if logprobs is None:
        return
    if "content" not in logprobs:
        logprobs["tokens"] = [entry["token"] for entry in entries]
        logprobs["top_logprobs"] = [
            {top["token"]: top["logprob"] for top in entry.get("top_logprobs") or ()}
            for entry in entries
        ]
        return
    for shown, entry in zip(logprobs["content"], entries, strict=True):
        shown["token"] = entry["token"]
        tops = zip(shown.get("top_logprobs") or (), entry.get("top_logprobs") or (), strict=False)
        for top, known in tops:
            top["token"] = known["token"]


def _end_before(choice: dict[str, Any], turn: Turn, body: dict[str, Any]) -> None:
    """A stop string is not part of the text, but its tokens are of the tokens."""
    if not isinstance(turn.stop, str) or body.get("include_stop_str_in_output"):
        return
    holder, name = (choice, "text") if "text" in choice else (choice["message"], "content")
    text = holder.get(name)
    if text and (at := text.rfind(turn.stop)) >= 0:
        holder[name] = text[:at]


COMPLETIONS = Route("/v1/completions", "completion_request", many=True)
CHAT = Route("/v1/chat/completions", "chat_request", many=False)


async def ask(service: Service, job: str, path: str, body: dict[str, Any]) -> Any:
    status, data = await service.ask(job, "POST", path, msgspec.json.encode(body))
    answer = msgspec.json.decode(data)
    if status != 200:
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = error.get("message", error) if isinstance(error, dict) else error
        raise Wrong(status, str(message))
    return answer


async def stream(
    route: Route, going: Exchange, body: dict[str, Any], prompts: list[list[Turn]]
) -> AsyncIterator[bytes]:
    """Server-sent events. What comes while an engine derenders goes into the next one."""
    states: list[Any] = [None] * len(going.turns)
    async for index, turn, before, over in going.stream():
        part = splitting.part(0, turn, before, over=over)
        asked = {
            "stream": True,
            "model": body.get("model"),
            "generate_chunk": {"request_id": going.id, "choices": [part]},
            "prompt_token_ids": turn.ask.prompt,
            "stream_state": states[index],
            route.wrapped: body,
        }
        found = await ask(going.service, going.job, f"{route.path}/derender", asked)
        states[index] = found["stream_state"]
        for choice in found["chunk"]["choices"]:
            choice["index"] = index
            if body.get("return_token_ids"):
                choice["token_ids"] = part["token_ids"]
            if body.get("return_tokens_as_token_ids") and part["logprobs"]:
                _name_by_ids(choice.get("logprobs"), part["logprobs"]["content"])
            if over:
                choice["weight_versions"] = part["weight_versions"]
        yield event(found["chunk"])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event(_usage(going, body, prompts))
    yield END


def _usage(going: Exchange, body: dict[str, Any], prompts: list[list[Turn]]) -> dict[str, Any]:
    read = sum(len(turns[0].ask.prompt) for turns in prompts)
    made = sum(len(turn.tokens) for turns in prompts for turn in turns)
    usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    return {"id": going.id, "model": body.get("model"), "choices": [], "usage": usage}
