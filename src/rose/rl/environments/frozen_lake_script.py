"""A scripted player of Frozen Lake: what a model that is still to learn it can imitate.

It names the cells around it and then goes: `L#D.R.U#>R` at the upper left, with ice to the right
and below. A wordy one says `L edge D ice R ice U edge>R`. How often its move is a good one is its
skill.
"""

from __future__ import annotations

import random
from collections import deque

from rose.rl.environments.frozen_lake import (
    DIRECTIONS,
    EDGE,
    GOAL,
    HOLE,
    ICE,
    FrozenLake,
    around,
    beside,
    cell,
    player,
)

WORDS = {ICE: "ice", HOLE: "hole", GOAL: "goal", EDGE: "edge"}


def scripted(grid: str, rng: random.Random, skill: float, wordy: bool = False) -> str:
    """A thought and a move: with the chance `skill` one of a shortest way, otherwise any."""
    rows = grid.splitlines()
    best = first_move(rows) if rng.random() < skill else None
    seen = in_words(around(rows)) if wordy else around(rows)
    return f"{seen}>{best or rng.choice(DIRECTIONS)}"


def in_words(seen: str) -> str:
    pairs = zip(seen[::2], seen[1::2], strict=True)
    return " ".join(f"{name} {WORDS[found]}" for name, found in pairs)


def first_move(rows: list[str]) -> str | None:
    """Of a shortest way to the goal around the holes, if there is a way."""
    start = player(rows)
    seen, ahead = {start}, deque([(start, "")])
    while ahead:
        place, first = ahead.popleft()
        for name in DIRECTIONS:
            there = beside(place, name)
            found = cell(rows, there)
            if found == GOAL:
                return first or name
            if found not in (HOLE, EDGE) and there not in seen:
                seen.add(there)
                ahead.append((there, first or name))
    return None


def play(
    seed: int, skill: float, rng: random.Random, env: FrozenLake, *, wordy: bool = False
) -> list[tuple[str, str]]:
    """One episode: what was seen and what was said, turn by turn."""
    turns: list[tuple[str, str]] = []
    observation, done = env.reset(seed), False
    while not done:
        said = scripted(env.grid, rng, skill, wordy)
        turns.append((observation, said))
        step = env.move(said)
        observation, done = step.observation, step.done
    return turns
