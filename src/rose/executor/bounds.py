"""How long serving needs for what is in its queue: upper bounds of its own next steps.

Requests that start while a long queue is cleared decode in the later steps of it: they cost time
and take room from the prompts behind them. And a step longer than the promised pace puts every
running request behind by the difference, again with each step the queue takes. Both are in here.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rose.executor.latency import Step


class LatencyBound(Protocol):
    def upper(self, step: Step) -> float: ...


class Queue(NamedTuple):
    """All requests of a serving engine, as its next steps see them."""

    decode: int
    """Requests that have their first token."""
    starting: int
    """Requests that have not, also those whose last prompt tokens are in flight."""
    prefill: int
    """Prompt tokens that no step has taken yet."""
    context: int
    """Tokens computed so far, of all of them."""

    def joined_by(self, prompt: int) -> Queue:
        return Queue(self.decode, self.starting + 1, self.prefill + prompt, self.context)


def bounds(queue: Queue, latency: LatencyBound, budget: int, tpot_s: float) -> tuple[float, float]:
    """Time a running request must keep for its next token, and until all prompts are done.

    `budget` is the most tokens of a step. The first bound is the next step's, or more when steps
    are longer than `tpot_s`: enough for every later token to be on pace until the queue is clear.
    """
    decode = queue.decode + queue.starting
    room = max(1, budget - decode)
    steps = max(1, -(-queue.prefill // room))
    context = queue.context + queue.prefill + (steps + 1) * decode
    first = min(queue.prefill, max(1, budget - queue.decode))
    step_s = latency.upper(Step(first, decode, context))
    last = queue.prefill - (steps - 1) * room
    clear_s = latency.upper(Step(last, decode, context))
    if steps > 1:
        clear_s += (steps - 1) * latency.upper(Step(room, decode, context))
    if steps == 1:
        return step_s, clear_s
    late = max(min(k * step_s, clear_s) - (k - 1) * tpot_s for k in range(1, steps + 1))
    return late, clear_s
