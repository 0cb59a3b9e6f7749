"""Episodes by their lengths, written and read again."""

from __future__ import annotations

from pathlib import Path

from rose.rl import lengths
from rose.rl.report import read
from rose.rl.types import Group, Said, Trajectory


def episode(turns: list[tuple[int, int]], heard_last: int = 0) -> Trajectory:
    made = Trajectory(0, 0)
    for heard, said in turns:
        made.hear([1] * heard)
        made.say(Said([2] * said, [0.0] * said, "stop"))
    made.hear([1] * heard_last)
    return made


def test_turns_come_back_as_they_were_played() -> None:
    turns = [(40, 9), (12, 1), (1, 16)]
    assert lengths.parsed(lengths.written(episode(turns))) == turns


def test_what_nobody_computes_is_left_out() -> None:
    assert lengths.parsed(lengths.written(episode([(40, 9)], heard_last=12))) == [(40, 9)]


def test_a_step_has_its_groups_in_order_and_those_that_were_replaced(tmp_path: Path) -> None:
    short, long = episode([(3, 1)]), episode([(3, 2), (4, 5)])
    groups = [Group(0, [short, long]), Group(1, [long]), Group(2, [short])]
    lengths.append(tmp_path, 1, groups, [groups[0], groups[2]])
    lengths.append(tmp_path, 2, [], [])
    assert read(tmp_path / lengths.LENGTHS) == [
        {"step": 1, "groups": [["3 1", "3 2 4 5"], ["3 2 4 5"], ["3 1"]], "useless": [1]},
        {"step": 2, "groups": [], "useless": []},
    ]
