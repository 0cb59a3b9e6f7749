"""What one window sends to serving: requests, their prompts, and what kind each is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from numpy.random import Generator

from rose.bench.arrivals import Request
from rose.bench.load import Prompts
from rose.bench.rollouts import RolloutPlan

VOCABULARY = (100, 20_000)
"""Token ids that every model used here has; random ids, so nothing is cached by chance."""


def tokens(count: int, rng: Generator) -> list[int]:
    ids: list[int] = rng.integers(*VOCABULARY, count).tolist()
    return ids


@dataclass(frozen=True)
class Given(Prompts):
    """Prompts that were made before: those of requests that have tokens in common."""

    ids: tuple[list[int], ...] = ()

    def make(self, index: int, tokens: int) -> list[int] | str:
        return self.ids[index]


@dataclass(frozen=True)
class Traffic:
    """By arrival; the window begins at `lead_s`, and what arrives before it is not judged."""

    requests: Sequence[Request]
    prompts: Prompts
    kinds: Sequence[str] = ()
    """One for each request where their latencies are to be told apart."""
    lead_s: float = 0.0


@dataclass(frozen=True)
class Sent:
    """One request, whole."""

    at_s: float
    prompt: list[int]
    output: int
    kind: str


def traffic(sent: Sequence[Sent], lead_s: float = 0.0) -> Traffic:
    """In the order of arrival."""
    ordered = sorted(sent, key=lambda one: one.at_s)
    return Traffic(
        [Request(one.at_s, len(one.prompt), one.output) for one in ordered],
        Given(ids=tuple(one.prompt for one in ordered)),
        [one.kind for one in ordered],
        lead_s,
    )


class Users(Protocol):
    """What serving's users send, and what the RL job does meanwhile."""

    @property
    def rate(self) -> float:
        """Requests a second."""

    @property
    def rollouts(self) -> RolloutPlan: ...

    @property
    def warm_s(self) -> float:
        """Rollouts run this long before the measured window."""

    def traffic(self, seconds: float, seed: int) -> Traffic:
        """Of a window; the same for the same seed."""
