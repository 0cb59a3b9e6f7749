"""A line for every step, whenever the trainer died."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from rose.rl import metrics
from rose.rl.checkpoint import Progress
from rose.rl.learner import Learned
from rose.rl.metrics import METRICS, StepFacts
from rose.rl.report import read


def facts(step: int) -> StepFacts:
    learned = Learned(0.1, 1.0, 0.0, 1e-6, 1e-5, 1.0, 0.5, 100)
    return StepFacts(step, step + 5, 0.5, 8, 2, 2, 3.0, 90, 0.0, 0, 2.0, 1.0, 3.0, learned)


def written(folder: Path, steps: range, torn: str = "") -> None:
    for step in steps:
        metrics.append(folder, facts(step))
    with (folder / METRICS).open("a") as file:
        file.write(torn)


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read(folder / METRICS)]


@pytest.mark.parametrize(
    ("lines", "torn", "checkpoint"),
    [
        (range(1, 4), "", 3),
        (range(1, 4), '{"step": 4, "rew', 3),  # died while it wrote of a step that is done again
        (range(1, 3), "", 3),  # died between checkpoint and line
        (range(1, 3), '{"step": 3, "rew', 3),  # died while it wrote that line
        (range(1, 6), "", 3),  # checkpoints are rarer than steps
    ],
)
def test_a_run_that_goes_on_has_each_step_once(
    tmp_path: Path, lines: range, torn: str, checkpoint: int
) -> None:
    written(tmp_path, lines, torn)
    metrics.mend(tmp_path, Progress("r", checkpoint, 5, asdict(facts(checkpoint))))
    assert steps(tmp_path) == list(range(1, checkpoint + 1))
    metrics.append(tmp_path, facts(checkpoint + 1))
    assert steps(tmp_path) == list(range(1, checkpoint + 2))


def test_a_new_run_has_no_lines(tmp_path: Path) -> None:
    metrics.mend(tmp_path, Progress())
    assert not (tmp_path / METRICS).exists()
    written(tmp_path, range(1, 3))
    metrics.mend(tmp_path, Progress())
    assert steps(tmp_path) == []
