"""Frozen Lake as text: a grid to be crossed without falling into a hole.

    P...        P the player, . ice, O a hole, G the goal
    .O.O
    ...O
    O..G
    L#D.R.U#    what is left, down, right and up of the player; # is the edge

After each move only the last line comes again. The model may think aloud: its move is the last of
the letters L, D, R and U that come after the last `>` of what it said; without one the player stays
where it is, and that counts as a move. gymnasium makes the maps, each of which can be solved, and
moves the player; nothing is slippery.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

from rose.rl.types import Step

DIRECTIONS = "LDRU"
"""In gymnasium's order: the place of a letter is its action."""
STEPS = dict(zip(DIRECTIONS, ((0, -1), (1, 0), (0, 1), (-1, 0)), strict=True))
"""Rows down and columns right."""
PLAYER, ICE, HOLE, GOAL, EDGE = "P.OG#"
SHOWN = str.maketrans("SFH", ICE + ICE + HOLE)
SIZES = range(2, 17)
LEAST_ICE = 0.6
"""With less, few large maps can be solved, and gymnasium looks for one for as long as it takes."""


@dataclass
class FrozenLake:
    size: int = 4
    p: float = 0.8
    """Chance of a cell to be ice; maps that cannot be solved are thrown away."""
    moves: int = 12
    """An episode has no more. A shortest way through a 4x4 map has 6."""
    _lake: gymnasium.Env[Any, Any] | None = field(default=None, init=False, repr=False)
    _cells: str = field(default="", init=False, repr=False)
    _at: int = field(default=0, init=False, repr=False)
    _moved: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size is {self.size}: give {SIZES.start} to {SIZES.stop - 1}")
        if not LEAST_ICE <= self.p <= 1.0:
            raise ValueError(f"p is {self.p}: give {LEAST_ICE} to 1")
        if self.moves < 1:
            raise ValueError(f"moves is {self.moves}: give at least 1")

    def reset(self, seed: int) -> str:
        rows = generate_random_map(self.size, self.p, seed)
        self._lake = FrozenLakeEnv(desc=rows, is_slippery=False)
        self._at, _ = self._lake.reset(seed=seed)
        self._cells = "".join(rows).translate(SHOWN)
        self._moved = 0
        return self.grid + self._around()

    async def step(self, action: str) -> Step:
        return self.move(action)

    def move(self, action: str) -> Step:
        """`step`, for who has no event loop."""
        if self._lake is None:
            raise RuntimeError("no episode is being played: reset comes first")
        reward, over = 0.0, False
        if (direction := parse(action)) is not None:
            self._at, gained, over, _, _ = self._lake.step(direction)
            reward = float(gained)
        self._moved += 1
        done = over or self._moved == self.moves
        if done:
            self.close()
        return Step(self._around(), reward, done)

    def close(self) -> None:
        self._lake = None

    @property
    def grid(self) -> str:
        """The map with the player in it."""
        cells = self._cells[: self._at] + PLAYER + self._cells[self._at + 1 :]
        begins = range(0, len(cells), self.size)
        return "".join(cells[begin : begin + self.size] + "\n" for begin in begins)

    def _around(self) -> str:
        return around(self.grid.splitlines()) + "\n"


Place = tuple[int, int]


def around(rows: list[str]) -> str:
    """The cells beside the player, each after its direction."""
    place = player(rows)
    return "".join(name + cell(rows, beside(place, name)) for name in DIRECTIONS)


def player(rows: list[str]) -> Place:
    for number, row in enumerate(rows):
        if PLAYER in row:
            return number, row.index(PLAYER)
    raise ValueError(f"there is no {PLAYER} in the grid {rows}")


def beside(place: Place, name: str) -> Place:
    down, right = STEPS[name]
    return place[0] + down, place[1] + right


def cell(rows: list[str], place: Place) -> str:
    row, column = place
    inside = 0 <= row < len(rows) and 0 <= column < len(rows[row])
    return rows[row][column] if inside else EDGE


def parse(said: str) -> int | None:
    """gymnasium's action in what was said."""
    _, mark, rest = said.rpartition(">")
    letters = [letter for letter in rest if letter in DIRECTIONS]
    return DIRECTIONS.index(letters[-1]) if mark and letters else None
