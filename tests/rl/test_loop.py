"""Which groups a step samples and learns from; the agents are made up here."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.rl.checkpoint import Progress
from rose.rl.learner import Learned
from rose.rl.loop import HELD_OUT, Sampled, Trainer
from rose.rl.metrics import METRICS
from rose.rl.report import read
from rose.rl.run import Episodes, RunConfig, Train
from rose.rl.types import Group, Trajectory
from rose.transfer.manifest import Step
from rose.transfer.publisher import Report


class Made:
    """Agents whose groups teach or not, by their number in a step, and take their time."""

    def __init__(self, teaches: Callable[[int], bool], seed: int | None = None) -> None:
        self._teaches = teaches
        self._late = None if seed is None else random.Random(seed)
        self.tasks: list[int] = []
        self.urgent: list[bool] = []
        self.running = self.most = 0

    async def group(self, label: str, task: int, samples: int, *, urgent: bool = False) -> Group:
        self.tasks.append(task)
        self.urgent.append(urgent)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.005 * self._late.random() if self._late else 0)
        self.running -= 1
        rewards = [1.0, 0.0] if self._teaches(task % 18) else [1.0, 1.0]
        return Group(task, [Trajectory(task, i, reward=r) for i, r in enumerate(rewards)])


def trainer_of(tmp_path: Path, made: Made, **train: Any) -> Trainer:
    config = RunConfig(
        name="t",
        model="tiny-a",
        out=tmp_path,
        store="file:///s",
        weights="tcp://127.0.0.1:1",
        seed=3,
        train=Train(tasks=6, samples=2, most_sampled=3.0, **train),
        episodes=Episodes(environment="frozen_lake"),
    )
    trainer = Trainer(config, print)
    trainer._agents = made  # type: ignore[assignment]
    return trainer


def sampled(tmp_path: Path, algorithm: Any, made: Made, step: int = 0) -> Sampled:
    return asyncio.run(trainer_of(tmp_path, made, algorithm=algorithm)._sample(step))


def test_grpo_takes_what_it_asked_for(tmp_path: Path) -> None:
    made = Made(lambda _: False)
    found = sampled(tmp_path, "grpo", made)
    assert (len(found.tried), len(found.used), made.most) == (6, 6, 6)


def test_dapo_replaces_a_group_as_soon_as_it_is_known_to_teach_nothing(tmp_path: Path) -> None:
    made = Made(lambda number: number % 2 == 0, seed=1)
    found = sampled(tmp_path, "dapo", made)
    assert len(found.used) == 6
    assert all(group.teaches for group in found.used)
    assert len(found.tried) == 11  # every second one, until six teach
    assert made.most == 6  # none is replaced early, and none waits for the others
    assert len(set(made.tasks)) == len(made.tasks) == len(found.tried)
    assert made.urgent == 6 * [False] + 5 * [True]


def test_dapo_samples_the_same_groups_whichever_ends_first(tmp_path: Path) -> None:
    runs = [sampled(tmp_path, "dapo", Made(lambda n: n % 3 != 1, seed)) for seed in range(5)]
    tried = [[group.task for group in run.tried] for run in runs]
    assert tried == [tried[0]] * 5
    assert [g.task for g in runs[0].tried] == sorted(g.task for g in runs[0].tried)


def test_dapo_gives_up_at_its_limit(tmp_path: Path) -> None:
    found = sampled(tmp_path, "dapo", Made(lambda _: False))
    assert (len(found.tried), found.used) == (18, [])


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_no_two_steps_share_a_task_and_none_is_held_out(tmp_path: Path, algorithm: str) -> None:
    made = Made(lambda number: number % 3 == 0)
    for step in range(5):
        sampled(tmp_path, algorithm, made, step)
    assert len(set(made.tasks)) == len(made.tasks)
    assert max(made.tasks) < HELD_OUT


class Order(Made):
    """Agents that tell when a step's sampling begins, and take a moment."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__(lambda _: True)
        self._happened = happened

    async def group(self, label: str, task: int, samples: int, *, urgent: bool = False) -> Group:
        if not self.running:
            self._happened.append(f"sample {label}")
        group = await super().group(label, task, samples)
        await asyncio.sleep(0.02)
        return group


def played(tmp_path: Path, *, off_policy: bool) -> list[str]:
    """What a run of three steps does, one after the other."""
    happened: list[str] = []
    trainer = trainer_of(tmp_path, Order(happened), steps=3, off_policy=off_policy)
    trainer.progress = Progress("r", 0, 10)

    def learn(groups: list[Group]) -> Learned:
        happened.append("learn")
        time.sleep(0.1)
        happened.append("learned")
        return Learned(0.1, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 5)

    def send() -> Report:
        happened.append(f"send {trainer.progress.version}")
        return Report(Step(None, trainer.progress.version), 9, 3, 30)

    trainer._learn = learn  # type: ignore[method-assign]
    trainer._send = send  # type: ignore[method-assign]
    trainer._checkpoint = lambda: None  # type: ignore[method-assign]
    asyncio.run(trainer._run(lambda facts: happened.append(f"step {facts.step}")))
    assert [row["step"] for row in read(tmp_path / METRICS)] == [1, 2, 3]
    return happened


def test_on_policy_steps_follow_each_other(tmp_path: Path) -> None:
    step = ["sample {0}", "learn", "learned", "send {1}", "step {2}"]
    expected = [word.format(i, 11 + i, 1 + i) for i in range(3) for word in step]
    assert played(tmp_path, off_policy=False) == expected


def test_off_policy_samples_the_next_step_while_it_learns(tmp_path: Path) -> None:
    happened = played(tmp_path, off_policy=True)
    for step in (1, 2):
        begun = happened.index(f"sample {step}")
        assert happened.index(f"send {10 + step}") > begun  # with weights from before that step
        assert happened[:begun].count("learned") == step - 1
    assert happened.count("learn") == 3
    assert not any(word.startswith("sample 3") for word in happened)
