"""Which turn is next, and how long turns get."""

from __future__ import annotations

from rose.scheduler.order import Lengths, Waiting, rank


def first(policy: str, *turns: Waiting) -> Waiting:
    return min(turns, key=lambda turn: rank(policy, turn))


def test_the_longest_goes_first_but_nobody_starves() -> None:
    short, long = Waiting(0.0, expected=50), Waiting(1.0, expected=900)
    assert first("longest_first", short, long) is long
    assert first("longest_first", short, Waiting(100.0, expected=900)) is short


def test_tools_that_return_lift_a_trajectory() -> None:
    new, old = Waiting(0.0, expected=0, turns=0), Waiting(5.0, expected=0, turns=3)
    assert first("c_mlfq", new, old) is old
    assert first("c_mlfq", new, Waiting(200.0, expected=0, turns=3)) is new


def test_fifo() -> None:
    assert first("fifo", Waiting(2.0, 9e9), Waiting(1.0, 1)).arrived == 1.0


def test_lengths_are_expected_by_the_closest_name() -> None:
    lengths = Lengths(first=256)
    assert lengths.expect("t:1", "all") == 256
    lengths.add(100, "t:1", "all")
    lengths.add(400, "t:2", "all")
    assert lengths.expect("t:1", "all") == 100
    assert 100 < lengths.expect("t:3", "all") < 400


def test_only_so_many_names_are_remembered() -> None:
    lengths = Lengths()
    for number in range(Lengths.MOST + 10):
        lengths.add(1, f"t:{number}")
    assert lengths.expect("t:0") == 256
    assert lengths.expect(f"t:{Lengths.MOST + 9}") == 1
