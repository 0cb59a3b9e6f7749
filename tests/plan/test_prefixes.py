"""Whose KV is where, and who loses it."""

from __future__ import annotations

from rose.plan.prefixes import Prefixes


def test_the_longest_unused_goes_when_memory_is_short() -> None:
    prefixes = Prefixes(2)
    prefixes.keep(0, 7, 100, room=250)
    prefixes.keep(0, 8, 100, room=250)
    prefixes.keep(0, 7, 120, room=250)
    prefixes.keep(1, 8, 90, room=250)
    assert prefixes.of(7) == {"0": 120} and prefixes.of(8) == {"0": 100, "1": 90}
    prefixes.keep(0, 9, 60, room=250)
    assert prefixes.of(8) == {"1": 90} and prefixes.of(9) == {"0": 60}
    prefixes.keep(0, 5, 999, room=250)
    assert not any(prefixes.of(trajectory) for trajectory in (5, 7, 9))


def test_what_is_forgotten_makes_room() -> None:
    prefixes = Prefixes(1)
    prefixes.keep(0, 7, 100, room=200)
    prefixes.forget(0, 7)
    prefixes.forget(0, 7)
    prefixes.keep(0, 8, 200, room=200)
    assert prefixes.of(7) == {} and prefixes.of(8) == {"0": 200}
    prefixes.clear(0)
    prefixes.keep(0, 9, 200, room=200)
    assert prefixes.of(8) == {} and prefixes.of(9) == {"0": 200}
