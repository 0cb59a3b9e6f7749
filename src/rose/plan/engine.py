"""One vLLM engine on a simulated device: continuous batching, step by step, many steps at once.

A step decodes one token of every running request and computes prompt tokens of waiting ones, first
come first served, up to a budget. While nobody waits all steps are alike until the first request
ends, so they are taken together; `cut` ends such a run at the end of the step in flight, when
something happens that the next step has to know.

Work is counted in seconds that the device would take if the engine had it alone. How fast time
passes for it is the device's matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

import msgspec

from rose.executor.latency import Step
from rose.plan.jitter import Jitter
from rose.plan.roofline import Latency

MOST_SEQUENCES = 256
"""vLLM's default `--max-num-seqs` on a server."""


class Job(msgspec.Struct, frozen=True):
    """A serving request or a rollout turn."""

    id: int
    prompt: int
    """Tokens to compute before the first new one; what is cached is not in it."""
    context: int
    """Tokens in its KV once that is done: cached ones and the prompt."""
    new: int
    """Tokens to make."""


class Event(msgspec.Struct, frozen=True):
    job: Job
    first: bool
    """Its first token is there; otherwise it has ended."""


@dataclass(frozen=True)
class EngineModel:
    """What an engine is like; the same for many devices."""

    latency: Latency
    kv_bytes: int
    """Of a token."""
    budget: int = 8192
    """Tokens of a step: vLLM's `--max-num-batched-tokens`."""
    sequences: int = MOST_SEQUENCES
    block: int = 1
    """Tokens of a KV block: of a prefix that was computed before, only whole ones are found."""
    jitter: Jitter | None = None
    """Steps take as long as `latency` says, or vary around it."""
    sends_s: float = 0.0
    """Of a step, for every token that it makes: not the engine's own time, but that of the process
    that sends it, on the same core."""


class Prompt:
    """Of a waiting job, what is left to compute."""

    __slots__ = ("job", "left")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.left = max(1, job.prompt)


class Engine:
    __slots__ = (
        "_mean", "budget", "chunk", "context", "ending", "made", "model", "prompts",
        "steps", "unit", "waiting", "weight", "work",
    )  # fmt: skip

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.budget = model.budget
        self._mean = model.latency.mean
        self.made = 0
        """Steps so far that decoded: every running request has made one token in each."""
        self.ending: list[tuple[int, int, Job]] = []
        """Running requests, a heap by the step that ends them."""
        self.waiting: deque[Prompt] = deque()
        self.prompts = 0
        """Tokens that are left of them."""
        self.context = 0
        """Tokens in the KV of running requests; of waiting ones as they are computed."""
        self.work = 0.0
        """Of the steps in flight; nothing is in flight when 0."""
        self.steps = 0
        self.unit = 0.0
        """Work of one of them."""
        self.chunk = 0
        """Prompt tokens in it."""
        self.weight = 1.0
        """What it gets where others get 1: more than that with a process that sends."""

    @property
    def busy(self) -> bool:
        return bool(self.ending or self.waiting)

    @property
    def count(self) -> int:
        return len(self.ending) + len(self.waiting)

    def add(self, job: Job) -> None:
        prompt = Prompt(job)
        self.waiting.append(prompt)
        self.prompts += prompt.left

    def plan(self, most: int | None = None) -> None:
        """Begin the next step, or as many as are alike; `most` tokens in each. With fewer than
        there are running requests, a step is as many smaller ones as it takes for all of them."""
        running = len(self.ending)
        budget = self.budget if most is None else min(most, self.budget)
        self.chunk = 0
        if self.waiting and running < self.model.sequences:
            self.chunk = min(max(0, budget - running), self._startable(running))
        self.steps = 1 if self.chunk or not running else self.ending[0][0] - self.made
        if budget < running:
            part = Step(0, budget, self.context * budget // running)
            self.unit = self._mean(part) * running / budget
        else:
            self.unit = self._mean(Step(self.chunk, running, self.context))
        if self.model.sends_s:
            self.weight = self.unit / (self.unit - self.model.sends_s * running)
        if self.model.jitter is not None:
            self.unit *= self.model.jitter.factor(self.steps)
        self.work = self.unit * self.steps

    def _startable(self, running: int) -> int:
        """Prompt tokens of those who have a place beside the running ones."""
        places = self.model.sequences - running
        if len(self.waiting) <= places:
            return self.prompts
        return sum(prompt.left for prompt in islice(self.waiting, places))

    def cut(self) -> None:
        """Of steps that are alike, only the one in flight remains."""
        if self.steps > 1:
            done = int((self.unit * self.steps - self.work) / self.unit)
            done = min(done, self.steps - 1)
            self._decoded(done)
            self.work -= self.unit * (self.steps - done - 1)
            self.steps = 1

    def done(self) -> list[Event]:
        """The steps in flight have ended: what came of them."""
        events: list[Event] = []
        self.work = 0.0
        self._decoded(self.steps)
        left = self.chunk
        while left > 0 and self.waiting:
            head = self.waiting[0]
            took = min(left, head.left)
            left -= took
            head.left -= took
            self.prompts -= took
            self.context += took
            if head.left:
                break
            self.waiting.popleft()
            job = head.job
            self.context += job.context - max(1, job.prompt) + 1
            events.append(Event(job, True))
            heappush(self.ending, (self.made + job.new - 1, job.id, job))
        while self.ending and self.ending[0][0] <= self.made:
            job = heappop(self.ending)[2]
            self.context -= job.context + job.new
            events.append(Event(job, False))
        return events

    def _decoded(self, steps: int) -> None:
        self.made += steps
        self.context += steps * len(self.ending)

    def remove(self, gone: set[int]) -> Iterator[tuple[Job, int]]:
        """Take jobs away; with the new tokens that each has made. No step may be in flight."""
        kept = []
        for ends, id_, job in self.ending:
            if id_ in gone:
                made = job.new - (ends - self.made)
                self.context -= job.context + made
                yield job, made
            else:
                kept.append((ends, id_, job))
        self.ending = kept
        heapify(self.ending)
        for prompt in [prompt for prompt in self.waiting if prompt.job.id in gone]:
            self.waiting.remove(prompt)
            self.prompts -= prompt.left
            self.context -= max(1, prompt.job.prompt) - prompt.left
            yield prompt.job, 0
