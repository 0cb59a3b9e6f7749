"""What a trajectory's engine has of it."""

from __future__ import annotations

from rose.scheduler import trajectories
from rose.scheduler.prefixes import BLOCK
from rose.scheduler.trajectories import NEW, Trajectories


def believed(known: Trajectories, version: str = "3", **cached: int) -> dict[str, int]:
    known.believe("t", version, cached)
    return cached


def test_the_engine_of_the_last_turn_has_all_of_it() -> None:
    known = Trajectories()
    assert known.last("t") == NEW and "t" not in known
    known.placed("t", "a", "3", 40, last=False)
    assert believed(known) == {"a": 40}
    known.ended("t", 51)
    assert believed(known, b=0) == {"a": 51, "b": 0}
    known.placed("t", "b", "3", 60, last=False)
    assert (known.last("t").engine, known.last("t").turns) == ("b", 2)


def test_other_weights_have_other_caches() -> None:
    known = Trajectories()
    known.placed("t", "a", "3", 40, last=False)
    assert believed(known, "4") == {}


def test_blocks_that_are_gone_are_believed() -> None:
    known = Trajectories()
    known.placed("t", "a", "3", 2 * BLOCK + 9, last=False)
    assert believed(known, a=BLOCK) == {"a": BLOCK}
    assert believed(known, a=2 * BLOCK) == {"a": 2 * BLOCK + 9}


def test_memory_ends_with_the_last_turn_and_is_bounded() -> None:
    known = Trajectories()
    known.placed("t", "a", "3", 40, last=False)
    known.placed("t", "a", "3", 40, last=True)
    assert "t" not in known
    known.placed("", "a", "3", 40, last=False)
    assert "" not in known
    for i in range(trajectories.MOST + 5):
        known.placed(str(i), "a", "3", 40, last=False)
    assert "4" not in known and "5" in known
