"""Who may begin: no more than there are places, everyone once, and by which queue."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.plan.places import Places


def made(each: float, *, dealt: bool, most: float = math.inf, samples: int = 4) -> Places:
    places = Places(each, most, dealt)
    places.clear(samples)
    return places


def test_shared_places_go_to_whoever_is_next() -> None:
    places = made(4, dealt=False)
    places.wait(range(12))
    assert list(places.enter(2)) == list(range(8))
    places.leave(5)
    assert list(places.enter(2)) == [8]
    assert list(places.enter(3)) == [9, 10, 11]


def test_all_in_flight_have_a_bound_too() -> None:
    places = made(4, dealt=False, most=6)
    places.wait(range(12))
    assert len(list(places.enter(2))) == 6


def test_a_free_place_is_of_no_use_to_another_queue() -> None:
    places = made(4, dealt=True)
    places.wait(range(16))  # four prompts in two queues: 0 and 2, 1 and 3
    assert sorted(places.enter(2)) == list(range(8))
    for trajectory in range(4):
        places.leave(trajectory)
    assert list(places.enter(2)) == [8, 9, 10, 11]
    for trajectory in range(8, 12):
        places.leave(trajectory)
    assert list(places.enter(2)) == []  # the last prompt waits for those of the other queue


def test_new_devices_take_what_waits() -> None:
    places = made(4, dealt=True)
    places.wait(range(16))
    list(places.enter(2))
    assert list(places.enter(4)) == list(range(8, 16))


@given(
    st.booleans(),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=20),
)
def test_everyone_begins_once_and_never_too_many(
    dealt: bool, count: int, course: list[tuple[int, int]]
) -> None:
    places = made(4, dealt=dealt)
    places.wait(range(count))
    running: list[int] = []
    begun: list[int] = []
    for devices, ends in [*course, *[(1, 99)] * count]:
        before = len(running)
        new = list(places.enter(devices))
        running += new
        begun += new
        assert len(running) <= max(before, 4 * devices)
        for trajectory in running[:ends]:
            places.leave(trajectory)
        running = running[ends:]
    assert sorted(begun) == list(range(count))


@pytest.mark.parametrize("dealt", [True, False])
def test_no_bound_is_no_bound(dealt: bool) -> None:
    places = made(math.inf, dealt=dealt)
    places.wait(range(1000))
    assert list(places.enter(1)) == list(range(1000))
