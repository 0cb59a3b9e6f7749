"""Questions that take a lookup table and a calculator, several turns, and one whole number.

    cost of 3 apple and 2 pear?       lookup: apple   ->  apple: price 7, stock 12
                                      lookup: pear    ->  pear: price 4, stock 30
                                      calc: 3*7+2*4   ->  29
                                      answer: 29      ->  reward 1

The table is drawn with the question and known to the tool alone. The model may think aloud: what
it does is its last line that is an action.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from rose.rl.environments.calculator import calculate
from rose.rl.types import Step

NAMES = ("apple", "cherry", "fig", "grape", "kiwi", "lemon", "lime", "mango", "peach", "pear",
         "plum", "quince")  # fmt: skip
OFFERED = 8
"""Items of a table: more than a question asks for."""
ACTION = re.compile(r"^[ \t]*(lookup|calc|answer):[ \t]*(.*?)[ \t]*$", re.MULTILINE)
ALLOWED = "Say one of these: `lookup: NAME`, `calc: EXPRESSION`, `answer: N`."


@dataclass(frozen=True)
class Item:
    price: int
    stock: int


@dataclass(frozen=True)
class Task:
    table: dict[str, Item]
    question: str
    answer: int


def draw(rng: random.Random, items: int) -> Task:
    """A question about so many items of a table."""
    table = {
        name: Item(rng.randint(2, 60), rng.randint(2, 40))
        for name in sorted(rng.sample(NAMES, OFFERED))
    }
    asked = rng.sample(sorted(table), items)
    if rng.random() < 0.5:
        counts = [rng.randint(2, 9) for _ in asked]
        wanted = " and ".join(f"{n} {name}" for n, name in zip(counts, asked, strict=True))
        cost = sum(n * table[name].price for n, name in zip(counts, asked, strict=True))
        return Task(table, f"cost of {wanted}?", cost)
    worth = sum(table[name].price * table[name].stock for name in asked)
    return Task(table, f"price of all {' and '.join(asked)} in stock?", worth)


@dataclass
class ToolUse:
    items: int = 2
    """That a question is about: the difficulty."""
    moves: int = 10
    """An episode has no more."""
    _task: Task | None = field(default=None, init=False, repr=False)
    _moved: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.items <= OFFERED:
            raise ValueError(f"items is {self.items}: give 1 to {OFFERED}")
        if self.moves <= self.items:
            raise ValueError(f"moves is {self.moves}: {self.items} lookups and an answer take more")

    def reset(self, seed: int) -> str:
        self._task = draw(random.Random(seed), self.items)
        self._moved = 0
        return f"{self._task.question}\n{ALLOWED}"

    async def step(self, action: str) -> Step:
        if self._task is None:
            raise RuntimeError("no episode is being played: reset comes first")
        self._moved += 1
        taken = _act(self._task, action)
        if taken.done or self._moved == self.moves:
            self.close()
            return Step(taken.observation, taken.reward, done=True)
        return taken

    def close(self) -> None:
        self._task = None


def _act(task: Task, said: str) -> Step:
    actions = ACTION.findall(said)
    if not actions:
        return Step(ALLOWED)
    kind, words = actions[-1]
    if kind == "answer":
        right = words == str(task.answer)
        return Step("right" if right else "wrong", float(right), done=True)
    if kind == "calc":
        try:
            return Step(str(calculate(words)))
        except ValueError as error:
            return Step(str(error))
    if item := task.table.get(words):
        return Step(f"{words}: price {item.price}, stock {item.stock}")
    return Step(f"There is no such item: there are {', '.join(task.table)}.")
