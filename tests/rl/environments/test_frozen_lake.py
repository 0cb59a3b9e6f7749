from __future__ import annotations

import asyncio
import random
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.rl.environments.frozen_lake import DIRECTIONS, FrozenLake, parse
from rose.rl.environments.frozen_lake_script import first_move, play, scripted


def reward(env: FrozenLake, seed: int, said: list[str]) -> float:
    env.reset(seed)
    return sum(env.move(action).reward for action in said)


def test_a_map_is_a_grid_with_the_player_at_its_begin_and_the_goal_at_its_end() -> None:
    env = FrozenLake()
    for seed in range(50):
        seen = env.reset(seed)
        assert re.fullmatch(r"([P.OG]{4}\n){4}L#D[.O]R[.O]U#\n", seen)
        grid = env.grid
        assert seen.startswith(grid)
        assert grid[0] == "P"
        assert grid[-2] == "G"
        assert grid.count("P") == grid.count("G") == 1


def test_a_seed_fixes_the_map_and_seeds_differ() -> None:
    maps = [FrozenLake().reset(seed) for seed in range(30)]
    assert maps == [FrozenLake().reset(seed) for seed in range(30)]
    assert len(set(maps)) > 20


def test_the_player_moves_and_stays_at_the_edge() -> None:
    env = FrozenLake(p=1.0)
    assert env.reset(0) == "P...\n....\n....\n...G\nL#D.R.U#\n"
    for said, grid, around in (
        (">L", "P...\n....\n....\n...G\n", "L#D.R.U#\n"),
        (">R", ".P..\n....\n....\n...G\n", "L.D.R.U#\n"),
        (">D", "....\n.P..\n....\n...G\n", "L.D.R.U.\n"),
        ("up is better >U", ".P..\n....\n....\n...G\n", "L.D.R.U#\n"),
    ):
        assert env.move(said).observation == around
        assert env.grid == grid


def test_the_goal_pays_and_ends() -> None:
    env = FrozenLake(size=2, p=1.0)
    env.reset(0)
    first, last = env.move(">R"), env.move(">D")
    assert (first.reward, first.done) == (0.0, False)
    assert (last.reward, last.done) == (1.0, True)
    assert env.grid == "..\n.P\n"


def test_a_hole_ends_without_reward() -> None:
    env = FrozenLake()
    seed = next(seed for seed in range(100) if env.reset(seed)[1] == "O")
    env.reset(seed)
    step = env.move(">R")
    assert (step.reward, step.done) == (0.0, True)
    assert env.grid.startswith(".P")


def test_an_invalid_move_leaves_all_as_it_is_but_counts() -> None:
    env = FrozenLake(moves=3)
    seen = env.reset(5)
    steps = [env.move(said) for said in ("R", "> right", "")]
    assert [env.grid + step.observation for step in steps] == [seen] * 3
    assert [step.done for step in steps] == [False, False, True]
    with pytest.raises(RuntimeError, match="reset"):
        env.move(">R")


def test_step_is_move() -> None:
    env, other = FrozenLake(), FrozenLake()
    assert env.reset(1) == other.reset(1)
    assert asyncio.run(env.step(">D")) == other.move(">D")


@given(st.text(alphabet="LDRU>x. "), st.sampled_from(DIRECTIONS), st.text(alphabet=".x 1#"))
def test_the_last_letter_after_the_last_mark_is_the_move(before: str, move: str, tail: str) -> None:
    assert parse(f"{before}>{before.replace('>', '')}{move}{tail}") == DIRECTIONS.index(move)
    assert parse(f"{before}{move}>{tail}") is None
    assert parse(before.replace(">", "") + move) is None


@pytest.mark.parametrize(
    ("options", "named"), [({"size": 1}, "size"), ({"p": 0.1}, "p is"), ({"moves": 0}, "moves")]
)
def test_what_cannot_be_played_is_refused(options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        FrozenLake(**options)  # type: ignore[arg-type]


def test_the_script_says_what_is_around_it_and_goes_a_shortest_way() -> None:
    rng = random.Random(0)
    assert scripted("P.\nOG\n", rng, 1.0) == "L#DOR.U#>R"
    assert scripted("...\nOP.\n..G\n", rng, 1.0) == "LOD.R.U.>D"
    assert first_move(["P.O.", "OO..", "...G"]) is None


def test_a_wordy_script_means_the_same() -> None:
    said = scripted("P.\nOG\n", random.Random(0), 1.0, wordy=True)
    assert said == "L edge D hole R ice U edge>R"
    assert parse(said) == DIRECTIONS.index("R")


def test_the_script_goes_around_holes() -> None:
    assert first_move([".P.", "OO.", "G.."]) == "R"


@pytest.mark.parametrize("size", [3, 4])
def test_full_skill_solves_every_map(size: int) -> None:
    env = FrozenLake(size=size)
    for seed in range(400):
        said = [said for _, said in play(seed, 1.0, random.Random(seed), env)]
        assert reward(env, seed, said) == 1.0


def test_no_skill_solves_few() -> None:
    env, rng = FrozenLake(), random.Random(7)
    plays = [(seed, [said for _, said in play(seed, 0.0, rng, env)]) for seed in range(400)]
    assert sum(reward(env, seed, said) for seed, said in plays) < 40


def test_a_play_is_whole_and_repeatable() -> None:
    env = FrozenLake()
    turns = play(3, 0.5, random.Random(1), env)
    assert turns == play(3, 0.5, random.Random(1), env)
    assert turns[0][0] == env.reset(3)
    shape = re.compile(r"L[.OG#]D[.OG#]R[.OG#]U[.OG#]>[LDRU]")
    for (_, said), (after, _) in pairwise(turns):
        assert shape.fullmatch(said)
        assert env.move(said).observation == after
    assert env.move(turns[-1][1]).done
