"""How many groups a training step samples, and when each may begin.

GRPO trains on every group, so each step asks for the same. DAPO's dynamic sampling throws away
groups whose samples all got the same reward and samples on until enough are left. Two ways to do
so, both without a barrier:

    replace   another group begins when one is found to be of no use, so that those begun are those
              wanted and the useless ones so far; nothing is sampled in vain, and the last ones of
              a long chain are waited for
    refill    `additional` groups more than wanted are kept running until enough are found, and what
              still runs then is thrown away; ROLL's environments, which are never idle

With a share `accept` of groups kept, a step takes about 1 / accept times the base batch, at most
`most` times; the share falls while the policy masters its tasks. ROSE reports up to 5.7 times.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Flags = NDArray[np.bool_]


class Demand(Protocol):
    """`samples` trajectories are a group; a step ends when `prompts` groups of use have ended."""

    @property
    def prompts(self) -> int: ...

    @property
    def samples(self) -> int: ...

    def useful(self, step: int, rng: Generator) -> Flags:
        """Of all groups that the step may begin, in order, which are of use."""

    def allowed(self, useful: int, useless: int) -> int:
        """Groups that may have begun when so many have ended."""

    def swing(self, step: int) -> float:
        """Groups expected in this step, as a multiple of `prompts`."""


@dataclass(frozen=True)
class Grpo:
    prompts: int
    samples: int

    def useful(self, step: int, rng: Generator) -> Flags:
        return np.ones(self.prompts, np.bool_)

    def allowed(self, useful: int, useless: int) -> int:
        return self.prompts

    def swing(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Accept:
    """The share of groups whose rewards differ: from `first` to `last` in a line, then it stays.

    By default the largest of 200 steps takes 5.7 times the batch with 64 prompts, what ROSE reports
    (it does not say of which run); with 16 prompts steps vary more, and it takes 6.3 times.
    """

    first: float = 0.6
    last: float = 0.204
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
    additional: float | None = None
    """Groups kept running beyond those wanted (`refill`); None: `replace`; infinite: as many as
    there are places for."""
    most: float = 10.0
    """Times `prompts`: verl's DAPO recipe gives up after ten batches."""

    def useful(self, step: int, rng: Generator) -> Flags:
        found: Flags = rng.random(int(self.prompts * self.most)) < self.accept.at(step)
        if self.additional is not None:
            return found
        enough = int(np.searchsorted(np.cumsum(found), self.prompts)) + 1
        return found[:enough]

    def allowed(self, useful: int, useless: int) -> int:
        if self.additional is None:
            return self.prompts + useless
        running = self.prompts + self.additional
        return int(min(running + useful + useless, self.prompts * self.most))

    def swing(self, step: int) -> float:
        return min(1.0 / self.accept.at(step), self.most)
