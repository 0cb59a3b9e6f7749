"""How many groups a training step samples, round by round.

GRPO trains on every group, so each step asks for the same. DAPO's dynamic sampling throws away
groups whose samples all got the same reward and samples on until enough are left, by the trainer's
own rule (`rose.rl.sampling`): one round of what is missing after another. With a share `accept` of
groups kept, a step takes about 1 / accept times the base batch, at most `most` times; the share
falls while the policy masters its tasks. ROSE reports up to 5.7 times.
"""

from dataclasses import dataclass, field
from typing import Protocol

from numpy.random import Generator

from rose.rl.sampling import next_round


class Demand(Protocol):
    """`samples` trajectories are a group."""

    @property
    def prompts(self) -> int: ...

    @property
    def samples(self) -> int: ...

    def rounds(self, step: int, rng: Generator) -> list[int]:
        """Groups to sample, one number for each round; a round begins when all before ended."""

    def swing(self, step: int) -> float:
        """Groups expected in this step, as a multiple of `prompts`."""


@dataclass(frozen=True)
class Grpo:
    prompts: int
    samples: int

    def rounds(self, step: int, rng: Generator) -> list[int]:
        return [self.prompts]

    def swing(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Accept:
    """The share of groups whose rewards differ: from `first` to `last` in a line, then it stays.

    By default such that the largest of 200 steps of 64 prompts takes what ROSE reports, about 5.7
    times the batch; with 16 prompts luck alone reaches 9 times.
    """

    first: float = 0.6
    last: float = 0.26
    steps: int = 200

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: give more than 0, up to 1")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}: give at least 1")

    def at(self, step: int) -> float:
        return self.first + (self.last - self.first) * min(step / self.steps, 1.0)


@dataclass(frozen=True)
class Dapo:
    prompts: int
    samples: int
    accept: Accept = field(default=Accept())
    most: float = 10.0
    """Times `prompts`: verl's DAPO recipe gives up after ten batches."""

    def rounds(self, step: int, rng: Generator) -> list[int]:
        share, limit = self.accept.at(step), int(self.prompts * self.most)
        asked: list[int] = []
        found = 0
        while more := next_round(self.prompts, found, sum(asked), limit):
            asked.append(more)
            found += int(rng.binomial(more, share))
        return asked

    def swing(self, step: int) -> float:
        """Luck adds to it on average: 6 % with 64 prompts, 14 % with 16."""
        return min(1.0 / self.accept.at(step), self.most)
