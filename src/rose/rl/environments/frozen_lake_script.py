"""A scripted player of Frozen Lake: what a model that is still to learn it can imitate.

It names the cells around it and then goes: `L#D.R.U#>R` at the upper left, with ice to the right
and below. How often its move is a good one is its skill.
"""

from __future__ import annotations

import random
from collections import deque

from rose.rl.environments.frozen_lake import (
    DIRECTIONS,
    EDGE,
    GOAL,
    HOLE,
    FrozenLake,
    around,
    beside,
    cell,
    player,
)


def scripted(grid: str, rng: random.Random, skill: float) -> str:
    """A thought and a move: with the chance `skill` one of a shortest way, otherwise any."""
    rows = grid.splitlines()
    best = first_move(rows) if rng.random() < skill else None
    return f"{around(rows)}>{best or rng.choice(DIRECTIONS)}"


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


def play(seed: int, skill: float, rng: random.Random, env: FrozenLake) -> list[tuple[str, str]]:
    """One episode: what was seen and what was said, turn by turn."""
    turns: list[tuple[str, str]] = []
    observation, done = env.reset(seed), False
    while not done:
        said = scripted(env.grid, rng, skill)
        turns.append((observation, said))
        step = env.move(said)
        observation, done = step.observation, step.done
    return turns
