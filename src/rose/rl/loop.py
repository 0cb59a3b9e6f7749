"""The training loop: sample, learn, checkpoint, publish, and again.

    tasks --> Agents --> front door --> engines, dedicated and borrowed
                |
             groups --> Learner --> checkpoint --> Publisher --> relay --> engines commit

A step's episodes are sampled with the weights of the step before (with `off_policy`, of the one
before that, while the learner works). Whatever is killed, the run goes on: turns are asked for
again under their ids, and a trainer starts from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose import models
from rose.rl import checkpoint, environments, lengths, metrics
from rose.rl.agent import Agents, Limits
from rose.rl.checkpoint import Progress
from rose.rl.dialogue import Dialogue
from rose.rl.door import Door, Sampling
from rose.rl.learner import Learned, Learner
from rose.rl.metrics import StepFacts
from rose.rl.run import RunConfig
from rose.rl.sampling import to_begin
from rose.rl.types import Ending, Group
from rose.rl.watch import watching
from rose.rl.weight_sync import COPIES, WeightSync
from rose.transfer.publisher import Report

HELD_OUT = 1 << 64
"""Tasks from here on are never trained on."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sampled:
    tried: list[Group]
    """In the order they were begun: DAPO replaces those whose rewards do not differ."""
    used: list[Group]
    """To learn from: fewer, if only those that differ in reward are wanted."""
    began: float
    ended: float


OnStep = Callable[[StepFacts], None]


class Trainer:
    """A run: `await Trainer(config, say).play()`."""

    def __init__(self, config: RunConfig, say: Say, secret: str = "") -> None:
        """`secret`: the scheduler's, if it has one."""
        self.config = config
        self._secret = secret
        self._say = say
        self._learning = ThreadPoolExecutor(1, "rose-learn")
        """Its priority and its cores are its own."""

    async def play(self, on_step: OnStep = lambda _: None) -> None:
        """The whole run, or what is left of it."""
        config = self.config
        async with self._ready(), watching(config.scheduler, config.out, self._secret):
            await self._run(on_step)

    @asynccontextmanager
    async def _ready(self) -> AsyncIterator[None]:
        config = self.config
        folder = models.resolve(config.model)
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._learner = Learner(
            model,
            config.train.algorithm,
            learning_rate=config.train.learning_rate,
            minibatches=config.train.minibatches,
            layers=config.train.layers,
            learned=config.train.learned,
            threads=max(1, config.train.threads),
        )
        self.progress = checkpoint.load(config.out, model, self._learner.optimiser)
        metrics.mend(config.out, self.progress)
        dialogue = Dialogue(AutoTokenizer.from_pretrained(folder))
        episodes = config.episodes
        limits = Limits(episodes.turns, episodes.context, episodes.in_flight)
        door = f"{config.scheduler.rstrip('/')}/jobs/{config.job}"
        # A copy of another run, whose versions have the same numbers, would not do.
        copy = COPIES / f"{config.name}-{self.progress.run}"
        self._weights = WeightSync(
            config.store,
            config.job,
            folder=str(copy),
            engines_from=config.weights,
            wire=config.wire,
            secret=self._secret,
        )
        async with Door(door, secret=self._secret) as policy:
            self._agents = Agents(
                policy,
                dialogue,
                lambda: environments.make(episodes.environment, **episodes.options),
                Sampling(max_tokens=episodes.turn_tokens),
                limits,
                self.progress,
            )
            try:
                await asyncio.to_thread(self._begin, door)
                yield
            finally:
                await asyncio.to_thread(self._weights.close)

    async def _run(self, on_step: OnStep) -> None:
        config, progress = self.config, self.progress
        loop = asyncio.get_running_loop()
        if progress.step == 0:
            await self.evaluate("before")
        ahead: asyncio.Task[Sampled] | None = None
        while progress.step < config.train.steps:
            began = time.monotonic()
            sampled = await (ahead or self._sample(progress.step))
            ahead = None
            if config.train.off_policy and progress.step + 1 < config.train.steps:
                ahead = asyncio.create_task(self._sample(progress.step + 1))
            learned = await loop.run_in_executor(self._learning, self._learn, sampled.used)
            progress.step += 1
            facts = self._told(sampled, learned, began)
            progress.told = asdict(facts)
            await asyncio.to_thread(self._checkpoint)
            synced = time.monotonic()
            report = await asyncio.to_thread(self._send)
            facts = facts.sent(report, synced - began, time.monotonic() - synced)
            metrics.append(config.out, facts)
            lengths.append(config.out, progress.step, sampled.tried, sampled.used)
            on_step(facts)
        await self.evaluate("after")

    # ---- sampling

    async def evaluate(self, when: str) -> None:
        """Mean reward on tasks that are never trained on, one episode each."""
        tasks = self.config.evaluation.tasks
        if tasks:
            async with asyncio.TaskGroup() as playing:
                groups = [
                    playing.create_task(self._agents.group(when, HELD_OUT + i, 1))
                    for i in range(tasks)
                ]
            found = {"tasks": tasks, "reward": sum(g.result().rewards[0] for g in groups) / tasks}
            (self.config.out / f"evaluation-{when}.json").write_text(json.dumps(found) + "\n")
            self._say(f"held-out tasks, {when} training: reward {found['reward']:.3f} of {tasks}")

    async def _sample(self, step: int) -> Sampled:
        """The groups of a step; of DAPO as many as differ in reward, if that can be had."""
        train, began = self.config.train, time.monotonic()
        most = int(train.tasks * train.most_sampled)
        tried: list[asyncio.Task[Group]] = []
        useless = 0

        def begin() -> None:
            for _ in range(to_begin(train.tasks, useless, len(tried), most)):
                play = self._agents.group(
                    str(step), self._task(step, len(tried), most), train.samples,
                    # The step cannot end before a replacement has, and that may be useless too.
                    urgent=bool(useless),
                )  # fmt: skip
                tried.append(playing.create_task(judged(play)))

        async def judged(play: Awaitable[Group]) -> Group:
            nonlocal useless
            group = await play
            if train.algorithm == "dapo" and not group.teaches:
                useless += 1
                begin()
            return group

        async with asyncio.TaskGroup() as playing:
            begin()
        groups = [one.result() for one in tried]
        used = [g for g in groups if train.algorithm == "grpo" or g.teaches]
        return Sampled(groups, used, began, time.monotonic())

    def _task(self, step: int, number: int, most: int) -> int:
        return (self.config.seed << 32) + step * most + number

    # ---- learning

    def _learn(self, groups: list[Group]) -> Learned:
        train = self.config.train
        if train.cores:
            os.sched_setaffinity(0, train.cores)  # of this thread, and of those it starts
        if train.idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        torch.set_num_threads(1 if train.threads else len(os.sched_getaffinity(0)))
        return self._learner.learn(groups)

    def _checkpoint(self) -> None:
        step, train = self.progress.step, self.config.train
        if step % train.checkpoint_every == 0 or step == train.steps:
            checkpoint.save(
                self.config.out, self.progress, self._learner.model, self._learner.optimiser
            )

    # ---- weights

    def _begin(self, door: str) -> None:
        """Bring the engines to where the run is, whatever they have."""
        progress, weights = self.progress, self._weights
        weights.open(door)
        newest = weights.newest
        if progress.first_version is None or (newest is not None and newest > progress.version):
            if progress.first_version is not None:  # published after the last checkpoint
                progress.run = Progress().run
            progress.first_version = (0 if newest is None else newest + 1) - progress.step
        if newest == progress.version:
            weights.lead(progress.version)
        else:
            self._send()
        if progress.step:
            self._say(f"going on after step {progress.step}, version {progress.version}")

    def _send(self) -> Report:
        return self._weights.send(self._learner.model.named_parameters(), self.progress.version)

    # ---- telling

    def _told(self, sampled: Sampled, learned: Learned, began: float) -> StepFacts:
        """Of a step whose weights are not sent yet."""
        episodes = [one for group in sampled.tried for one in group.trajectories]
        oldest = min((v for one in episodes for v in one.versions), default=self.progress.version)
        now = time.monotonic()
        return StepFacts(
            step=self.progress.step,
            version=self.progress.version,
            reward=sum(one.reward for one in episodes) / len(episodes),
            episodes=len(episodes),
            groups_tried=len(sampled.tried),
            groups_used=len(sampled.used),
            turns=sum(one.turns for one in episodes) / len(episodes),
            tokens=sum(one.made for one in episodes),
            truncated=sum(one.ending != Ending.DONE for one in episodes) / len(episodes),
            staleness=self.progress.version - 1 - oldest,
            sample_s=sampled.ended - sampled.began,
            learn_s=now - max(began, sampled.ended),
            step_s=now - began,
            learned=learned,
        )
