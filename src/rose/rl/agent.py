"""The agent loop: one task per episode, turn by turn, and groups of episodes of one task.

Episodes overlap: while the tool of one works, turns of others run. An episode's identity and its
turns' ids follow from run, step, task and sample alone, so an agent that is started again asks for
the very turns that it asked for before. Its seeds do not depend on the run: another run of the same
tasks with the same weights draws the same, so two ways to run a job can be compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import xxhash

from rose.rl.checkpoint import Progress
from rose.rl.dialogue import Dialogue
from rose.rl.door import Sampling
from rose.rl.environments.base import Environment
from rose.rl.places import Places
from rose.rl.types import Ending, Group, Said, Trajectory


class Policy(Protocol):
    """Where turns are made: the front door, or a stand-in for it."""

    async def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        *,
        id_: str,
        trajectory: str,
        seed: int,
        stop: int,
        last: bool = False,
    ) -> Said: ...


@dataclass(frozen=True)
class Limits:
    turns: int = 16
    """Of an episode."""
    context: int = 1024
    """Tokens of an episode."""
    in_flight: int = 256
    """Episodes at once."""


class Agents:
    """Plays episodes of one environment with one policy."""

    def __init__(
        self,
        policy: Policy,
        dialogue: Dialogue,
        make: Callable[[], Environment],
        sampling: Sampling,
        limits: Limits,
        progress: Progress,
    ) -> None:
        self._policy = policy
        self._dialogue = dialogue
        self._make = make
        self._sampling = sampling
        self._limits = limits
        self._progress = progress
        self._places = Places(limits.in_flight)

    async def group(self, label: str, task: int, samples: int, *, urgent: bool = False) -> Group:
        """`samples` episodes of a task, all in flight at once. One that fails ends the others.
        `urgent`: before episodes that have not begun."""

        async def in_turn(sample: int) -> Trajectory:
            async with self._places.one(urgent=urgent):
                return await self.play(label, task, sample)

        async with asyncio.TaskGroup() as playing:
            found = [playing.create_task(in_turn(i)) for i in range(samples)]
        return Group(task, [one.result() for one in found])

    async def play(self, label: str, task: int, sample: int) -> Trajectory:
        """One episode, to its end."""
        name = f"{label}/{task}.{sample}"
        id_ = f"{self._progress.run}/{name}"
        environment, played = self._make(), Trajectory(task, sample)
        began = time.monotonic()
        try:
            played.hear(self._dialogue.opening(environment.reset(task)))
            played.prompt = len(played.tokens)
            await self._turns(environment, played, id_, name)
        finally:
            environment.close()
        played.seconds = time.monotonic() - began
        return played

    async def _turns(
        self, environment: Environment, played: Trajectory, id_: str, name: str
    ) -> None:
        limits = self._limits
        while True:
            left = limits.context - len(played.tokens)
            if left < 1 or played.turns >= limits.turns:
                played.ending = Ending.LENGTH if left < 1 else Ending.TURNS
                return
            said = await self._policy.generate(
                played.tokens,
                Sampling(self._sampling.temperature, min(left, self._sampling.max_tokens)),
                id_=f"{id_}/{played.turns}",
                trajectory=id_,
                seed=xxhash.xxh3_64_intdigest(f"{name}/{played.turns}".encode()) >> 2,
                stop=self._dialogue.end,
                last=played.turns + 1 == limits.turns,
            )
            played.say(said)
            began = time.monotonic()
            answer = await environment.step(self._dialogue.text(said.tokens))
            played.tool_seconds += time.monotonic() - began
            played.reward += answer.reward
            if answer.done:
                played.ending = Ending.DONE
                return
            if said.tokens[-1:] != [self._dialogue.end]:
                played.hear(
                    [self._dialogue.end]
                )  # cut at its length: the turn is over all the same
            played.hear(list(self._dialogue.reply(answer.observation)))
