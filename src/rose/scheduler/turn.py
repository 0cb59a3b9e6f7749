"""A turn, one LLM call of a trajectory: what is asked, what has come so far, how it ended.

    accepted -> queued -> placed -> streaming -> done | aborted
                  ^                     |
                  +------ resumed ------+

A turn that is cut (its engine was revoked, died, stalls, drains) goes back to the queue with its
tokens so far. What is sent next is prompt + those tokens with the budget that is left, so the
client sees one uninterrupted answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec


class State(StrEnum):
    QUEUED = "queued"
    PLACED = "placed"
    """Sent to an engine, nothing has come yet."""
    STREAMING = "streaming"
    DONE = "done"
    ABORTED = "aborted"
    """Given up by its client, or refused by an engine for what it asks."""


class Cut(StrEnum):
    """Why a turn did not end where it was."""

    REVOKED = "revoked"
    """The engine ended it: its lease is over, its memory was taken, it drains or is dormant."""
    LOST = "lost"
    """The connection broke."""
    FAILED = "failed"
    """The engine answered with an error of its own."""
    STALLED = "stalled"
    """No token for too long, while the engine had time for others."""
    GONE = "gone"
    """The engine's node no longer answers, or the lease was given back."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of one turn. Kept in the ledger."""

    id: str
    """Of the request, and the number of the turn in it."""
    job: str
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any] = {}
    """As vLLM's sampling parameters; without what changes from attempt to attempt."""
    seed: int | None = None
    extra: dict[str, Any] = {}
    """Further fields of the request, passed on as they came."""
    trajectory: str = ""
    """Turns of one trajectory share prefixes; its own id when it has none."""
    group: str = ""
    """Samples of one prompt."""
    last: bool = False
    """The trajectory ends with this turn: nobody will need its prefix again."""


class Span(msgspec.Struct):
    """Output tokens from `start` on were made with the weights of `version`."""

    start: int
    version: str


class Chunk(msgspec.Struct):
    """What an engine sends of a turn."""

    tokens: list[int]
    logprobs: list[Any] | None = None
    finish: str | None = None
    stop: int | str | None = None
    spans: list[Span] | None = None
    """Of all this attempt has sent; with its last chunk."""
    cached: int | None = None
    """Prompt tokens that the engine had in its prefix cache."""


@dataclass
class Turn:
    ask: Ask
    arrived: float
    state: State = State.QUEUED
    engine: str | None = None
    attempt: int = 0
    """Number of the request to an engine; what comes of an older one is not taken."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: str | None = None
    stop: int | str | None = None
    error: str = ""
    status: int = 200
    """What the client gets as HTTP status if it was aborted for what it asks."""
    since: float = 0.0
    """When the state began, or the last token came."""
    sent: int = 0
    """Tokens there were when the attempt began."""
    cached: int = 0
    """Tokens that its engine was believed to have."""
    cuts: list[Cut] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.ABORTED)

    @property
    def left(self) -> int:
        return self.ask.max_tokens - len(self.tokens)

    @property
    def length(self) -> int:
        """Of its context now."""
        return len(self.ask.prompt) + len(self.tokens)

    def take(self, chunk: Chunk, version: str, now: float) -> None:
        """Append what came. `version` is the engine's, until its last chunk says more."""
        if chunk.tokens:
            self.state, self.since = State.STREAMING, now
            if not self.spans or self.spans[-1].version != version:
                self.spans.append(Span(len(self.tokens), version))
            self.tokens += chunk.tokens
            if chunk.logprobs is not None:
                self.logprobs += chunk.logprobs
        if chunk.spans:
            self._believe(chunk.spans)

    def _believe(self, spans: list[Span]) -> None:
        """The engine's word for all that this attempt sent, joined to what others did."""
        before = [span for span in self.spans if span.start < self.sent]
        for span in spans:
            if not before or before[-1].version != span.version:
                before.append(Span(self.sent + span.start, span.version))
        self.spans = before


def request(turn: Turn, salt: str) -> dict[str, Any]:
    """The body of the next attempt, for vLLM's `/inference/v1/generate`.

    Every attempt has a seed of its own: the same one would repeat the draws of the part before.
    """
    ask, done = turn.ask, len(turn.tokens)
    sampling = dict(ask.sampling)
    sampling["max_tokens"] = turn.left
    if minimum := sampling.get("min_tokens"):
        sampling["min_tokens"] = max(0, minimum - done)
    if not sampling.get("stop") and ask.extra.get("output_mode", "tokens") == "tokens":
        sampling.setdefault("detokenize", False)  # nobody reads the text there
    if ask.seed is not None:
        sampling["seed"] = (ask.seed + turn.attempt) % 2**63
    if mine := ask.extra.get("cache_salt"):
        salt = f"{salt}-{mine}"
    return {
        **ask.extra,
        "request_id": f"{ask.id}-{turn.attempt}",
        "token_ids": ask.prompt + turn.tokens,
        "sampling_params": sampling,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
