"""`lengths.jsonl`: how long the turns of a step's episodes were, so that they can be played again.

A line for every step that was done: its groups in the order they were begun, which of them were
replaced by another (`rl.sampling`), and of each the episodes, each as "heard said heard said ...",
tokens of the prompt first. A step that is done again after a kill has a second line, and that one
counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rose.rl.types import Group, Trajectory

LENGTHS = "lengths.jsonl"


def append(folder: Path, step: int, groups: Sequence[Group], used: Sequence[Group]) -> None:
    told = {
        "step": step,
        "groups": [[written(one) for one in group.trajectories] for group in groups],
        "useless": [i for i, group in enumerate(groups) if group not in used],
    }
    with (folder / LENGTHS).open("a") as file:
        file.write(json.dumps(told) + "\n")


def written(episode: Trajectory) -> str:
    """What is heard after the last turn is left out: nobody computes it."""
    runs = [str(sum(1 for _ in run)) for _, run in groupby(episode.mask)]
    return " ".join(runs[: len(runs) // 2 * 2])


def parsed(told: str) -> list[tuple[int, int]]:
    """Of each turn the tokens that come before it and those that it makes."""
    numbers = [int(word) for word in told.split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))
