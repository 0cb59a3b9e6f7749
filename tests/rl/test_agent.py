"""Episodes against a scripted policy: tokens, masks, limits, ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.rl.policies import Scripted

from rose.rl.agent import Agents, Limits
from rose.rl.checkpoint import Progress
from rose.rl.dialogue import Dialogue
from rose.rl.door import Sampling
from rose.rl.environments import FrozenLake
from rose.rl.places import Places
from rose.rl.types import Ending, Step


def agents(policy: Scripted, tokenizer: Any, make: Any = FrozenLake, **limits: int) -> Agents:
    return Agents(
        policy,
        Dialogue(tokenizer),
        make,
        Sampling(max_tokens=20),
        Limits(**{"turns": 12, "context": 480} | limits),
        Progress(run="r"),
    )


def test_an_episode_is_exactly_what_was_said(tokenizer: Any) -> None:
    policy = Scripted(tokenizer, lambda _: "stay")  # no move: the player stays until the end
    played = asyncio.run(agents(policy, tokenizer).play("7", task=5, sample=2))
    assert (played.turns, played.ending, played.reward) == (12, Ending.DONE, 0.0)
    assert len(played.tokens) == len(played.mask) == len(played.logprobs)
    made = [t for t, mine in zip(played.tokens, played.mask, strict=True) if mine]
    assert tokenizer.decode(made, skip_special_tokens=True) == "stay" * 12
    assert made.count(tokenizer.eos_token_id) == 12
    env = FrozenLake()
    first = tokenizer.encode(env.reset(5), add_special_tokens=False)
    assert played.tokens[: played.prompt] == first
    assert {p for p, m in zip(played.logprobs, played.mask, strict=True) if m} == {-0.5}
    assert {p for p, m in zip(played.logprobs, played.mask, strict=True) if not m} == {0.0}
    assert played.versions == [3]


def test_each_turn_continues_the_tokens_before_it(tokenizer: Any) -> None:
    policy = Scripted(tokenizer, lambda _: "x")
    played = asyncio.run(agents(policy, tokenizer).play("7", 5, 0))
    for earlier, later in zip(policy.asked, policy.asked[1:], strict=False):
        assert later["tokens"][: len(earlier["tokens"])] == earlier["tokens"]
    assert played.tokens[: len(policy.asked[-1]["tokens"])] == policy.asked[-1]["tokens"]


def test_a_turn_cut_at_its_length_is_ended_by_the_environment(tokenizer: Any) -> None:
    policy = Scripted(tokenizer, lambda _: "long", cut=True)
    played = asyncio.run(agents(policy, tokenizer, turns=2).play("7", 5, 0))
    ends = [i for i, t in enumerate(played.tokens) if t == tokenizer.eos_token_id]
    assert len(ends) == 2
    assert [played.mask[i] for i in ends] == [0, 0]
    assert played.ending == Ending.TURNS


def test_an_episode_ends_where_its_context_does(tokenizer: Any) -> None:
    policy = Scripted(tokenizer, lambda _: "word")
    played = asyncio.run(agents(policy, tokenizer, context=60).play("7", 5, 0))
    assert played.ending == Ending.LENGTH
    assert all(one["sampling"].max_tokens + len(one["tokens"]) <= 60 for one in policy.asked)


def test_ids_and_seeds_are_the_same_again_and_differ_between_samples(tokenizer: Any) -> None:
    def asked(sample: int) -> list[tuple[str, int]]:
        policy = Scripted(tokenizer, lambda _: "x")
        asyncio.run(agents(policy, tokenizer).play("3", 1, sample))
        return [(one["id_"], one["seed"]) for one in policy.asked]

    assert asked(0) == asked(0)
    assert asked(0)[0][0] == "r/3/1.0/0"
    both = asked(0) + asked(1)
    assert len({id_ for id_, _ in both}) == len({seed for _, seed in both}) == len(both)


def test_tools_of_different_episodes_overlap(tokenizer: Any) -> None:
    running = most = 0

    class Slow:
        def reset(self, seed: int) -> str:
            return "go"

        async def step(self, action: str) -> Step:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return Step("done", 1.0, True)

        def close(self) -> None:
            pass

    policy = Scripted(tokenizer, lambda _: "x")

    async def go(in_flight: int) -> list[Any]:
        ones = agents(policy, tokenizer, Slow, in_flight=in_flight)
        return await asyncio.gather(*(ones.group("0", task, 4) for task in (1, 2, 3)))

    groups = asyncio.run(go(100))
    assert [(g.task, len(g.trajectories)) for g in groups] == [(1, 4), (2, 4), (3, 4)]
    assert [t.sample for t in groups[1].trajectories] == [0, 1, 2, 3]
    assert most == 12
    most = 0
    asyncio.run(go(5))
    assert most == 5


def test_urgent_groups_go_before_those_that_wait(tokenizer: Any) -> None:
    began: list[int] = []

    class Noted(FrozenLake):
        def reset(self, seed: int) -> str:
            began.append(seed)
            return super().reset(seed)

        async def step(self, action: str) -> Step:
            await asyncio.sleep(0.01)
            return Step("done", 1.0, True)

    async def go() -> None:
        ones = agents(Scripted(tokenizer, str), tokenizer, Noted, in_flight=2)
        async with asyncio.TaskGroup() as playing:
            for task, urgent in ((1, False), (2, False), (3, True)):
                playing.create_task(ones.group("0", task, 2, urgent=urgent))

    asyncio.run(go())
    assert began == [1, 1, 3, 3, 2, 2]


def test_a_place_given_to_who_gave_up_goes_to_the_next() -> None:
    async def go() -> list[str]:
        places, had = Places(1), []

        async def stay(name: str) -> None:
            async with places.one(urgent=False):
                had.append(name)
                await asyncio.sleep(0)

        async with places.one(urgent=False):
            early, late, last = (asyncio.create_task(stay(n)) for n in ("early", "late", "last"))
            await asyncio.sleep(0)
            early.cancel()  # while it waits
            await asyncio.sleep(0)
        late.cancel()  # when it has been given the place, and has not heard of it
        await asyncio.wait_for(last, 5)
        await asyncio.gather(early, late, return_exceptions=True)
        return had

    assert asyncio.run(go()) == ["last"]


def test_an_environment_that_breaks_ends_the_rest(tokenizer: Any) -> None:
    class Broken(FrozenLake):
        async def step(self, action: str) -> Step:
            raise OSError("the tool is gone")

    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(agents(Scripted(tokenizer, str), tokenizer, Broken).group("0", 1, 2))
    assert "the tool is gone" in str(failed.value.exceptions[0])
