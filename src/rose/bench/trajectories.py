"""What agents ask: a first prompt, then turns of tokens made, a tool, and what the tool says.

Recorded ones come from a CSV with one row per call (`session`, `step`, `start_s`, `input_bytes`,
`output_bytes`, plain or .gz). Without one they are drawn from laws fitted to such records: many
short trajectories and a long tail, most tools quick and some very slow.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from rose.bench.traces import TraceError

BYTES_PER_TOKEN = 4
TOKENS_PER_S = 40.0
"""What recorded calls made: the rest of the time until the next call was the tool's."""
LONGEST_TOOL_S = 60.0


class Turn(NamedTuple):
    output: int
    """Tokens to make."""
    tool_s: float
    """Until the next turn."""
    observation: int
    """Tokens the tool adds."""


class Trajectory(NamedTuple):
    group: int
    """Trajectories of one group have the same first prompt."""
    prompt: int
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """In the end."""
        return self.prompt + sum(turn.output + turn.observation for turn in self.turns)


def recorded(path: Path) -> list[Trajectory]:
    """Every session of a record with two or more calls."""
    sessions: dict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for row in csv.DictReader(lines):
                sessions[row.get("agent", ""), row["session"]].append(row)
        found = [_of_calls(number, calls) for number, calls in enumerate(sessions.values())]
    except (OSError, EOFError, csv.Error, KeyError, ValueError) as error:
        raise TraceError(f"{path}: not a record of agents' calls ({error})") from error
    usable = [one for one in found if len(one.turns) > 1]
    if not usable:
        raise TraceError(f"{path} holds no trajectory with two calls")
    return usable


def _of_calls(number: int, calls: Sequence[Mapping[str, str]]) -> Trajectory:
    read = [int(call["input_bytes"]) // BYTES_PER_TOKEN for call in calls]
    made = [max(1, int(call["output_bytes"]) // BYTES_PER_TOKEN) for call in calls]
    began = [float(call["start_s"]) for call in calls]
    turns = []
    for k, output in enumerate(made):
        last = k == len(calls) - 1
        gap = 0.0 if last else began[k + 1] - began[k] - output / TOKENS_PER_S
        grown = 0 if last else read[k + 1] - read[k] - output
        turns.append(Turn(output, min(LONGEST_TOOL_S, max(0.0, gap)), max(1, grown)))
    return Trajectory(number, max(1, read[0]), tuple(turns))


def drawn(count: int, rng: Generator) -> list[Trajectory]:
    """Made up, one group each."""

    def lengths(middle: float, sigma: float, many: int, most: int) -> list[int]:
        values = rng.lognormal(np.log(middle), sigma, many)
        return [int(value) for value in np.clip(values, 1, most)]

    made = []
    for number, turns in enumerate(lengths(16, 0.9, count, 100)):
        outputs = lengths(110, 1.3, turns, 8000)
        tools = np.clip(rng.lognormal(np.log(1.2), 1.6, turns), 0.0, LONGEST_TOOL_S)
        added = lengths(160, 1.2, turns, 8000)
        steps = zip(outputs, map(float, tools), added, strict=True)
        made.append(
            Trajectory(number, lengths(1000, 1.0, 1, 16_000)[0], tuple(map(Turn._make, steps)))
        )
    return made


def workload(
    some: Sequence[Trajectory], count: int, group: int, tokens: float, seconds: float, most: int
) -> list[Trajectory]:
    """`count` of them in groups of `group` samples, smaller and faster by these factors; what would
    exceed `most` tokens ends sooner."""
    made = []
    for number in range(count):
        one = some[(number // group) % len(some)]
        left = most - max(1, round(one.prompt * tokens))
        turns: list[Turn] = []
        for turn in one.turns:
            scaled = Turn(
                max(1, round(turn.output * tokens)),
                turn.tool_s * seconds,
                max(1, round(turn.observation * tokens)),
            )
            left -= scaled.output + scaled.observation
            if left < 0 and turns:
                break
            turns.append(scaled)
        prompt = max(1, min(round(one.prompt * tokens), most // 2))
        made.append(Trajectory(number // group, prompt, tuple(turns)))
    return made
