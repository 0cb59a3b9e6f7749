"""Rollouts with long tails: turns, tokens and tool times of trajectories, as flat arrays.

Every trajectory has a difficulty, a standard normal score, part of which all samples of a prompt
share. The number of turns is the quantile at that score, so hard ones have many. The tokens of a
turn are log-normal, and part of their variance is the difficulty too, so hard ones also write
more each time. Tool times and observations are drawn for each turn on its own.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.random import Generator

from rose.bench.arrivals import Counts, Lengths, LogNormal, Times
from rose.plan.workload.quantiles import Quantiles

TAIL_BEGINS = 0.3
"""Of the rollout's duration: where ROSE reports 75 % of the trajectories to have finished."""

DRAWN = 5_000
"""Trajectories from which a law's mean is known to a few percent."""

_share_below = np.frompyfunc(NormalDist().cdf, 1, 1)


@dataclass(frozen=True, eq=False)
class Trajectories:
    """The turns of trajectory i are offset[i] to offset[i + 1], at least one.

    A turn makes `output` tokens, then a tool takes `tool_s` seconds and adds `observation` tokens
    that the next turn reads. After a trajectory's last turn both are 0.
    """

    group: Counts
    prompt: Counts
    """Tokens that the first turn reads, the same in all of a group."""
    offset: Counts
    output: Counts
    observation: Counts
    tool_s: Times

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def turns(self) -> Counts:
        return np.diff(self.offset)

    @property
    def tokens(self) -> Counts:
        """In the end, of each trajectory."""
        made: Counts = np.add.reduceat(self.output + self.observation, self.offset[:-1])
        return self.prompt + made

    @property
    def contexts(self) -> Counts:
        """Tokens in the KV of each turn when it ends."""
        return _contexts(self.prompt, self.turns, self.output, self.observation)

    def durations(self, token_s: float, read_s: float = 0.0) -> Times:
        """Seconds of each trajectory if it never waits: `token_s` per token made, `read_s` per
        token read, with all that was read before still cached."""
        turn = self.output * token_s + self.observation * read_s + self.tool_s
        turns: Times = np.add.reduceat(turn, self.offset[:-1])
        return self.prompt * read_s + turns


def tail_share(durations: Times, part: float = TAIL_BEGINS) -> float:
    """Share of the trajectories that finish in this part of the longest one's duration."""
    return float(np.mean(durations <= part * durations.max()))


@dataclass(frozen=True)
class Rollouts:
    """A law of trajectories."""

    prompt: Lengths
    turns: Quantiles
    output: LogNormal
    """Tokens made in one turn."""
    observation: Lengths
    tool_s: Quantiles
    alike: float
    """Of the difficulty's variance, what the samples of one prompt share: 0 to 1."""
    steady: float
    """Of the variance of a turn's log tokens, what is its trajectory's difficulty: 0 to 1."""
    context: int
    """Tokens. A trajectory ends before a turn that would not fit; prompts take half at most."""

    def __post_init__(self) -> None:
        for name in ("alike", "steady"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 to 1")
        if self.context < 2:
            raise ValueError(f"context is {self.context}: give 2 tokens or more")

    def draw(self, prompts: int, samples: int, rng: Generator) -> Trajectories:
        """`samples` trajectories of each of `prompts` prompts, those of a prompt side by side."""
        if prompts < 1 or samples < 1:
            raise ValueError(f"prompts is {prompts} and samples {samples}: give at least 1")
        group = np.repeat(np.arange(prompts), samples)
        shared = rng.standard_normal(prompts)[group]
        own = rng.standard_normal(len(group))
        hard = np.sqrt(self.alike) * shared + np.sqrt(1.0 - self.alike) * own
        prompt = np.minimum(self.prompt.array(prompts, rng), self.context // 2)[group]
        steps = self.turns.at(_share_below(hard).astype(np.float64))
        turns = np.maximum(np.rint(steps), 1.0).astype(np.int64)
        output = self._output(np.repeat(hard, turns), rng)
        observation = self.observation.array(len(output), rng)
        tool_s = self.tool_s.values(len(output), rng)
        return _fitted(group, prompt, turns, output, observation, tool_s, self.context)

    def context_in_flight(self) -> float:
        """Tokens expected of a trajectory under way: the mean of turns, each for as long as it
        makes tokens, because long ones are met more often."""
        drawn = self.draw(DRAWN, 1, np.random.default_rng(0))
        return float(np.average(drawn.contexts, weights=drawn.output))

    def _output(self, hard: Times, rng: Generator) -> Counts:
        own = rng.standard_normal(len(hard))
        score = np.sqrt(self.steady) * hard + np.sqrt(1.0 - self.steady) * own
        tokens = np.rint(self.output.median * np.exp(self.output.sigma * score))
        clipped: Counts = np.clip(tokens, 1, self.output.cap).astype(np.int64)
        return clipped


def make_rollouts(law: Rollouts, prompts: int, samples: int, seed: int) -> Trajectories:
    """The same for the same arguments, bit for bit."""
    return law.draw(prompts, samples, np.random.default_rng(seed))


def _fitted(
    group: Counts,
    prompt: Counts,
    turns: Counts,
    output: Counts,
    observation: Counts,
    tool_s: Times,
    context: int,
) -> Trajectories:
    """Without the turns that exceed the context, and nothing after each last turn."""
    first = np.cumsum(turns) - turns
    output[first] = np.minimum(output[first], context - prompt)
    kept = _contexts(prompt, turns, output, observation) <= context
    offset = np.concatenate(([0], np.cumsum(np.add.reduceat(kept, first, dtype=np.int64))))
    output, observation, tool_s = output[kept], observation[kept], tool_s[kept]
    last = offset[1:] - 1
    observation[last] = 0
    tool_s[last] = 0.0
    return Trajectories(group, prompt, offset, output, observation, tool_s)


def _contexts(prompt: Counts, turns: Counts, output: Counts, observation: Counts) -> Counts:
    grown = output + observation
    before = np.cumsum(grown) - grown
    reached: Counts = np.repeat(prompt - before[np.cumsum(turns) - turns], turns) + before + output
    return reached
