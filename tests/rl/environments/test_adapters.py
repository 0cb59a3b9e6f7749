from __future__ import annotations

import asyncio
from string import printable
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Discrete, Text

from rose.rl.environments import GymText
from rose.rl.types import Step


class Echo(gymnasium.Env[str, str]):
    """Says what it heard, until it hears `stop` or has heard enough."""

    observation_space = Text(40, charset=printable)
    action_space = Text(40, charset=printable)

    def __init__(self, patience: int = 3) -> None:
        self.patience = patience
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.heard = 0
        return f"say {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.heard += 1
        return action, 0.5, action == "stop", self.heard == self.patience, {}

    def close(self) -> None:
        self.closed = True


class Count(gymnasium.Env[int, int]):
    """Numbers in, numbers out."""

    observation_space = Discrete(100)
    action_space = Discrete(10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.sum = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, int, bool, bool, dict[str, Any]]:
        self.sum += action
        return self.sum, action, self.sum > 10, False, {}


def steps(env: GymText, *actions: str) -> list[Step]:
    async def go() -> list[Step]:
        return [await env.step(action) for action in actions]

    return asyncio.run(go())


def test_text_goes_through_as_it_is() -> None:
    env = GymText(Echo)
    first = env.reset(5)
    assert first.startswith("say ")
    assert (env.reset(5), env.reset(6)) == (first, GymText(Echo).reset(6))
    assert steps(env, "hello", "stop") == [Step("hello", 0.5), Step("stop", 0.5, done=True)]


def test_truncated_is_done() -> None:
    env = GymText(Echo)
    env.reset(0)
    assert [step.done for step in steps(env, "a", "b", "c")] == [False, False, True]


def test_what_is_not_text_is_shown_and_read() -> None:
    env = GymText(Count, parse=int, show="the sum is {}".format)
    assert env.reset(0) == "the sum is 0"
    assert steps(env, " 7", "4") == [
        Step("the sum is 7", 7.0),
        Step("the sum is 11", 4.0, done=True),
    ]


def test_what_cannot_be_read_is_answered_and_not_done() -> None:
    env = GymText(Count, parse=int, show=str)
    env.reset(0)
    answered, after = steps(env, "seven", "7")
    assert "seven" in answered.observation
    assert (answered.reward, answered.done) == (0.0, False)
    assert after == Step("7", 7.0)


@pytest.mark.parametrize(
    ("given", "missing"), [({}, "show"), ({"show": str}, "parse"), ({"parse": int}, "show")]
)
def test_what_is_not_text_needs_words(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=f"is not text: give {missing}"):
        GymText(Count, **given)


def test_closing_closes_and_a_reset_makes_it_anew() -> None:
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo())
        return made[-1]

    env = GymText(make)
    env.reset(0)
    env.close()
    env.close()
    assert made[0].closed
    with pytest.raises(RuntimeError, match="reset"):
        steps(env, "hello")
    env.reset(0)
    assert steps(env, "hello") == [Step("hello", 0.5)]
    assert [one.closed for one in made] == [True, False]
