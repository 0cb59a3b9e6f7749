from __future__ import annotations

import asyncio
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.rl.environments.calculator import LARGEST, LONGEST, calculate
from rose.rl.environments.tool_use import ALLOWED, ToolUse, draw
from rose.rl.types import Step


def steps(env: ToolUse, *actions: str) -> list[Step]:
    async def go() -> list[Step]:
        return [await env.step(action) for action in actions]

    return asyncio.run(go())


def asked(prompt: str) -> list[tuple[int | None, str]]:
    """Count, where one is given, and name."""
    words = prompt.splitlines()[0].removeprefix("price of all ").removeprefix("cost of ")
    parts = words.removesuffix(" in stock?").removesuffix("?").split(" and ")
    return [(int(part.split()[0]) if " " in part else None, part.split()[-1]) for part in parts]


def solve(env: ToolUse, seed: int) -> Step:
    """By what the tools say and nothing else."""
    terms = []
    for count, name in asked(env.reset(seed)):
        (found,) = steps(env, f"I need a price.\nlookup: {name}")
        price, stock = re.findall(r"\d+", found.observation)
        terms.append(f"{price}*{stock if count is None else count}")
    (total,) = steps(env, f"calc: {'+'.join(terms)}")
    (last,) = steps(env, f"answer: {total.observation}")
    return last


@pytest.mark.parametrize("items", [1, 2, 5])
def test_tools_lead_to_the_answer(items: int) -> None:
    env = ToolUse(items=items)
    for seed in range(60):
        assert solve(env, seed) == Step("right", 1.0, done=True)


def test_a_question_does_not_tell_the_table() -> None:
    for seed in range(60):
        prompt = ToolUse(items=3).reset(seed)
        numbers = re.findall(r"\d+", prompt)
        assert numbers == [str(count) for count, _ in asked(prompt) if count is not None]


def test_a_seed_fixes_the_question() -> None:
    prompts = [ToolUse().reset(seed) for seed in range(40)]
    assert prompts == [ToolUse().reset(seed) for seed in range(40)]
    assert len(set(prompts)) > 30
    assert draw(random.Random(3), 2) == draw(random.Random(3), 2)


def test_a_wrong_answer_ends_without_reward() -> None:
    for answer in ("0", "many", ""):
        env = ToolUse()
        env.reset(0)
        (step,) = steps(env, f"answer: {answer}")
        assert (step.reward, step.done) == (0.0, True)
    with pytest.raises(RuntimeError, match="reset"):
        steps(env, "answer: 1")


def test_an_unknown_action_is_told_what_is_allowed() -> None:
    env = ToolUse()
    env.reset(0)
    for said in ("hello", "", "look: apple", "Answer 5"):
        assert steps(env, said) == [Step(ALLOWED)]


def test_an_unknown_item_is_told_what_there_is() -> None:
    env = ToolUse()
    name = asked(env.reset(0))[0][1]
    (step,) = steps(env, "lookup: gold")
    assert name in step.observation
    assert not step.done


def test_the_last_action_of_a_turn_counts() -> None:
    env = ToolUse()
    env.reset(0)
    (step,) = steps(env, "answer: 1\nno, first\n  calc: 2*(3+4)  \nthat is all")
    assert step == Step("14")


def test_moves_run_out() -> None:
    env = ToolUse(items=1, moves=3)
    env.reset(0)
    assert [step.done for step in steps(env, "calc: 1", "hm", "calc: 2")] == [False, False, True]


@pytest.mark.parametrize("options", [{"items": 0}, {"items": 9}, {"items": 3, "moves": 3}])
def test_what_cannot_be_played_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"items|moves"):
        ToolUse(**options)


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from("+-*"), part).map(" ".join),
        part.map("({})".format),
        part.map("-{}".format),
    ),
    max_leaves=6,
)


@given(expressions)
def test_the_calculator_agrees_with_python(expression: str) -> None:
    expected = eval(expression)
    if len(expression) <= LONGEST and abs(expected) < 10**6:
        assert calculate(expression) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "2**9", "2**2**2**2", "x", "__import__('os')", "abs(1)", "1/2", "1//2", "7%2",
        "1.5", "1e9", "0x10", "1_000", "True", "1 if 1 else 2", "(1,2)", "[1]", "1(2)", "()",
        "(((", "007", "1\n2", "~1", "1<2", "9" * LONGEST, "1+" * LONGEST + "1", f"{LARGEST}*2",
        "999999*999999*999999", "-" * 10_000 + "1", "(" * 90 + "1" + ")" * 20,
    ],
)  # fmt: skip
def test_the_calculator_takes_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        calculate(expression)


def test_calculator_errors_are_observations() -> None:
    env = ToolUse()
    env.reset(0)
    (step,) = steps(env, "calc: 9**9**9")
    assert "+ - *" in step.observation
    assert not step.done
