"""What the RL side talks about.

*Message* what somebody says in a dialogue · *Step* what an environment answers to an action ·
*Said* one turn of the model, with its tokens and log-probs · *Trajectory* one episode, as tokens ·
*Group* the episodes of one task, judged against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Ending(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    """The environment said so."""
    TURNS = "turns"
    """It had as many turns as it may have."""
    LENGTH = "length"
    """The next turn would not fit into the context."""


@dataclass(frozen=True)
class Step:
    """What an environment answers to an action."""

    observation: str
    reward: float = 0.0
    """Summed over the episode."""
    done: bool = False


@dataclass(frozen=True)
class Said:
    """One turn of the model, exactly as it was sampled."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token, by the engine that sampled it."""
    finish: str
    """`stop`, `length`."""
    versions: tuple[int, ...] = ()
    """Policy versions that its tokens are of, in order."""


@dataclass
class Trajectory:
    """One episode as the trainer sees it: tokens, and which of them the model made."""

    task: int
    """Seed of the environment: equal within a group."""
    sample: int
    """Which of its group."""
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    """How many of the tokens came before the model said anything."""
    mask: list[int] = field(default_factory=list)
    """1 for every token that the model made, 0 for what the environment said."""
    logprobs: list[float] = field(default_factory=list)
    """Of the model's tokens, as sampled; 0.0 for others."""
    reward: float = 0.0
    turns: int = 0
    ending: Ending = Ending.DONE
    versions: list[int] = field(default_factory=list)
    """Policy versions that took part, ascending."""
    seconds: float = 0.0
    tool_seconds: float = 0.0
    """Of these, spent in the environment."""

    def hear(self, tokens: list[int]) -> None:
        """What is not the model's: the prompt, observations, the template around them."""
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def say(self, said: Said) -> None:
        self.tokens += said.tokens
        self.mask += [1] * len(said.tokens)
        self.logprobs += said.logprobs
        self.versions = sorted({*self.versions, *said.versions})
        self.turns += 1

    @property
    def made(self) -> int:
        """Tokens that the model made."""
        return sum(self.mask)


@dataclass
class Group:
    """All samples of one task."""

    task: int
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float]:
        return [one.reward for one in self.trajectories]

    @property
    def teaches(self) -> bool:
        """Samples differ in reward: otherwise nothing can be learned from comparing them."""
        return len(set(self.rewards)) > 1
