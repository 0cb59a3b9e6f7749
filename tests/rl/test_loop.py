"""Which groups a step samples and learns from; the agents are made up here."""

from __future__ import annotations

import asyncio
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
    """Agents whose groups teach or not, by their place."""

    def __init__(self, teaches: Callable[[int], bool]) -> None:
        self._teaches = teaches
        self.tasks: list[int] = []
        self.rounds: list[int] = []

    async def groups(self, label: str, tasks: list[int], samples: int) -> list[Group]:
        self.rounds.append(len(tasks))
        made = []
        for task in tasks:
            rewards = [1.0, 0.0] if self._teaches(len(self.tasks)) else [1.0, 1.0]
            self.tasks.append(task)
            made.append(Group(task, [Trajectory(task, i, reward=r) for i, r in enumerate(rewards)]))
        return made


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
    assert (len(found.tried), len(found.used), made.rounds) == (6, 6, [6])


def test_dapo_samples_on_until_enough_groups_differ(tmp_path: Path) -> None:
    made = Made(lambda place: place % 2 == 0)
    found = sampled(tmp_path, "dapo", made)
    assert len(found.used) == 6
    assert all(group.teaches for group in found.used)
    assert 11 <= len(found.tried) <= 18
    assert len(set(made.tasks)) == len(made.tasks)


def test_dapo_gives_up_at_its_limit(tmp_path: Path) -> None:
    found = sampled(tmp_path, "dapo", Made(lambda _: False))
    assert (len(found.tried), found.used) == (18, [])


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_no_two_steps_share_a_task_and_none_is_held_out(tmp_path: Path, algorithm: str) -> None:
    made = Made(lambda place: place % 3 == 0)
    for step in range(5):
        sampled(tmp_path, algorithm, made, step)
    assert len(set(made.tasks)) == len(made.tasks)
    assert max(made.tasks) < HELD_OUT


class Order(Made):
    """Agents that tell when a step's sampling begins, and take a moment."""

    def __init__(self, happened: list[str]) -> None:
        super().__init__(lambda _: True)
        self._happened = happened

    async def groups(self, label: str, tasks: list[int], samples: int) -> list[Group]:
        self._happened.append(f"sample {label}")
        await asyncio.sleep(0.02)
        return await super().groups(label, tasks, samples)


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
