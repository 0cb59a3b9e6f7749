"""Agents' trajectories: read from records, drawn from laws, cut to size."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from rose.bench.agents import first_prompt, right
from rose.bench.emulated import answer_to
from rose.bench.traces import TraceError
from rose.bench.trajectories import Trajectory, Turn, drawn, recorded, workload

ROWS = """agent,session,step,start_s,gap_s,input_bytes,output_bytes
x,0,0,0.0,2.0,400,80
x,0,1,2.0,9.0,800,40
x,1,0,0.0,,400,80
y,0,0,0.0,1.0,100,8
y,0,1,100.0,,90,8
"""


def test_sessions_with_several_calls_are_trajectories(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv.gz"
    path.write_bytes(gzip.compress(ROWS.encode()))
    assert recorded(path) == [
        Trajectory(0, 100, (Turn(20, 1.5, 80), Turn(10, 0.0, 1))),
        Trajectory(2, 25, (Turn(2, 60.0, 1), Turn(2, 0.0, 1))),
    ]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "session,start_s,input_bytes\n1,2,3\n"])
def test_what_is_no_record_is_said_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calls.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"calls\.csv"):
        recorded(path)
    with pytest.raises(TraceError, match="nowhere"):
        recorded(tmp_path / "nowhere.csv")


def test_drawn_ones_are_many_sided_and_repeatable() -> None:
    made = drawn(200, np.random.default_rng(1))
    assert made == drawn(200, np.random.default_rng(1))
    turns = sorted(len(one.turns) for one in made)
    assert turns[20] < 8 < turns[100] < turns[190]


def test_a_workload_has_groups_and_limits() -> None:
    one = Trajectory(0, 1000, tuple(Turn(100, 2.0, 100) for _ in range(50)))
    made = workload([one], 6, group=2, tokens=0.1, seconds=0.5, most=300)
    assert [each.group for each in made] == [0, 0, 1, 1, 2, 2]
    assert made[0].tokens <= 300
    assert made[0].turns[0] == Turn(10, 1.0, 10)
    assert first_prompt(made[0]) == first_prompt(made[1]) != first_prompt(made[2])


def test_only_the_right_answer_is_right() -> None:
    for prompt in ([5], [1, 2, 3] * 9):
        made, _ = answer_to(prompt, 12, ignore_eos=True)
        assert right(prompt, made, 12)
        assert not right(prompt, made[:-1], 12)
        assert not right(prompt, [*made[:5], made[5] + 1, *made[6:]], 12)
        assert not right([*prompt, 7], made, 12)
