"""Which waiting turn is next? A pure order, so that the step's last trajectory ends sooner.

`longest_first`, the default: a step lasts as long as its longest trajectory, so those that will
likely make most tokens go first. Having come earlier counts as tokens, so nobody starves. What a
turn will make is guessed from the trajectory's turns before, samples of the same prompt, the job's.

`c_mlfq`: a queue of several levels that needs no guess. Every tool that returns lifts a trajectory
by one level: who has had many turns is in the tail already, and the tail decides. A level is worth
`LEVEL_S` of waiting. After Libra's, which is fed by tool returns as well.

`fifo` is there to be compared with. None of them depends on the time, so a heap can keep them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

WAITING_TOKENS_PER_S = 20.0
"""About what a turn makes in the time it waits: waiting for a minute weighs 1,200 tokens."""
LEVELS = 8
LEVEL_S = 30.0
SMOOTHING = 0.3
"""Weight of the newest length in a running mean."""


class Waiting(msgspec.Struct, frozen=True):
    """A waiting turn as an order sees it."""

    arrived: float
    expected: float
    """Tokens that its trajectory will likely make from here."""
    turns: int = 0
    """Of the trajectory, before this one."""


def rank(policy: str, turn: Waiting) -> float:
    """The lowest goes first."""
    return POLICIES[policy](turn)


def _longest_first(turn: Waiting) -> float:
    return WAITING_TOKENS_PER_S * turn.arrived - turn.expected


def _c_mlfq(turn: Waiting) -> float:
    return turn.arrived - LEVEL_S * min(LEVELS, turn.turns)


def _fifo(turn: Waiting) -> float:
    return turn.arrived


POLICIES: dict[str, Callable[[Waiting], float]] = {
    "longest_first": _longest_first,
    "c_mlfq": _c_mlfq,
    "fifo": _fifo,
}


class Lengths:
    """Running means of how long turns get, by whatever they have in common."""

    MOST = 10_000
    """Names remembered; the oldest go first."""

    def __init__(self, first: float = 256.0) -> None:
        self._first = first
        self._means: dict[str, float] = {}

    def add(self, tokens: int, *names: str) -> None:
        for name in filter(None, names):
            mean = self._means.pop(name, None)
            self._means[name] = (
                float(tokens) if mean is None else mean + SMOOTHING * (tokens - mean)
            )
        while len(self._means) > self.MOST:
            del self._means[next(iter(self._means))]

    def expect(self, *names: str) -> float:
        """By the first name that is known: put the closest first."""
        return next((self._means[name] for name in names if name in self._means), self._first)
