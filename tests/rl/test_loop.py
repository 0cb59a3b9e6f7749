"""Which groups a step samples and learns from; the agents are made up here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.rl.loop import HELD_OUT, Sampled, Trainer
from rose.rl.run import Episodes, RunConfig, Train
from rose.rl.types import Group, Trajectory


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


def sampled(tmp_path: Path, algorithm: Any, made: Made, step: int = 0) -> Sampled:
    config = RunConfig(
        name="t",
        model="tiny-a",
        out=tmp_path,
        store="file:///s",
        weights="tcp://127.0.0.1:1",
        seed=3,
        train=Train(algorithm=algorithm, tasks=6, samples=2, most_sampled=3.0),
        episodes=Episodes(environment="frozen_lake"),
    )
    trainer = Trainer(config, print)
    trainer._agents = made  # type: ignore[assignment]
    return asyncio.run(trainer._sample(step))


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
