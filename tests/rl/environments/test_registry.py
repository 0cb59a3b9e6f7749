from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
from tests.rl.environments.test_adapters import Count, Echo

from rose.rl.environments import FrozenLake, GymText, LongTail, ToolUse, check, make


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    gymnasium.register("RoseEcho-v0", Echo)
    gymnasium.register("RoseCount-v0", Count)
    yield
    for name in ("RoseEcho-v0", "RoseCount-v0"):
        del gymnasium.registry[name]


def test_environments_are_made_by_name_with_their_options() -> None:
    assert make("frozen_lake", size=5, p=1, moves=20) == FrozenLake(5, 1, 20)
    assert make("tool_use", items=3) == ToolUse(3)
    tail = make("long_tail", time_scale=1, turn_scale=0.5)
    assert isinstance(tail, LongTail)
    assert (tail.time_scale, tail.turn_scale) == (1, 0.5)


@pytest.mark.parametrize("name", ["frozen_lake", "tool_use", "long_tail", "gym:RoseEcho-v0"])
def test_each_plays(name: str) -> None:
    check(name, {})
    env = make(name)
    for seed in (1, 2):
        first = env.reset(seed)
        assert first
        assert asyncio.run(env.step("anything>")).observation is not None
        env.close()
        assert env.reset(seed) == first
    env.close()


def test_gymnasium_environments_take_their_own_options() -> None:
    env = make("gym:RoseEcho-v0", patience=1)
    assert isinstance(env, GymText)
    env.reset(0)
    assert asyncio.run(env.step("hello")).done
    env = make("gym:RoseEcho-v0", max_episode_steps=2)
    env.reset(0)
    assert not asyncio.run(env.step("hello")).done
    assert asyncio.run(env.step("hello")).done


def test_gymnasium_environments_take_words_for_what_is_not_text() -> None:
    lake = make("gym:FrozenLake-v1", parse="LDRU".index, show=str, is_slippery=False)
    assert lake.reset(0) == "0"
    assert asyncio.run(lake.step("D")).observation == "4"
    with pytest.raises(ValueError, match="not text"):
        make("gym:RoseCount-v0")


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("frozen_pond", {}, r"'frozen_pond': there are frozen_lake, tool_use, long_tail and gym:ID"),
    ("", {}, "there is no environment ''"),
    ("frozen_lake", {"slippery": 1}, "frozen_lake has no option slippery: it has size, p, moves"),
    ("frozen_lake", {"_moved": 1}, "no option _moved"),
    ("long_tail", {"sleep": print}, "no option sleep"),
    ("frozen_lake", {"size": "four"}, "option size of environment frozen_lake is 'four', not a wh"),
    ("frozen_lake", {"size": 4.0}, "size"),
    ("frozen_lake", {"moves": True}, "moves"),
    ("long_tail", {"time_scale": "1"}, "time_scale of environment long_tail is '1', not a number"),
    ("frozen_lake", {"size": 1}, "environment frozen_lake: size is 1"),
    ("tool_use", {"items": 100}, "environment tool_use: items is 100"),
    ("gym:NoSuch-v0", {}, "there is no environment gym:NoSuch-v0"),
    ("gym:no_such_module:NoSuch-v0", {}, "no_such_module"),
    ("gym:RoseEcho-v0", {"noise": 1}, "gym:RoseEcho-v0 has no option noise: .*patience"),
]


@pytest.mark.parametrize(("name", "options", "said"), BAD)
def test_what_there_is_not_is_said(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(name, **options)
    with pytest.raises(ValueError, match=said):
        check(name, options)


def test_a_check_makes_no_gymnasium_environment() -> None:
    def never() -> gymnasium.Env[Any, Any]:
        raise AssertionError("made")

    gymnasium.register("RoseNever-v0", never)
    try:
        check("gym:RoseNever-v0", {})
    finally:
        del gymnasium.registry["RoseNever-v0"]
