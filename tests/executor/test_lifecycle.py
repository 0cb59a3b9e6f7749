from itertools import product

import pytest

from rose.executor.facts import LeaseState
from rose.executor.lifecycle import follow, holds_memory, takes_turns

DORMANT, ACTIVATING, ACTIVE, DRAINING = LeaseState
CONDITIONS = list(product([False, True], repeat=2))


@pytest.mark.parametrize("state", LeaseState)
@pytest.mark.parametrize(("has_memory", "empty"), CONDITIONS)
def test_a_revocation_takes_one_step_from_anywhere(
    state: LeaseState, has_memory: bool, empty: bool
) -> None:
    assert follow(state, DORMANT, has_memory=has_memory, empty=empty) == DORMANT


@pytest.mark.parametrize("state", [DORMANT, ACTIVATING])
@pytest.mark.parametrize("empty", [False, True])
def test_activation_waits_for_memory(state: LeaseState, empty: bool) -> None:
    assert follow(state, ACTIVE, has_memory=False, empty=empty) == ACTIVATING
    assert follow(state, ACTIVE, has_memory=True, empty=empty) == ACTIVE


@pytest.mark.parametrize("has_memory", [False, True])
def test_an_active_engine_stays_active_when_its_memory_is_cut(has_memory: bool) -> None:
    assert follow(ACTIVE, ACTIVE, has_memory=has_memory, empty=False) == ACTIVE


@pytest.mark.parametrize("state", [ACTIVATING, ACTIVE, DRAINING])
def test_draining_ends_when_the_engine_is_empty(state: LeaseState) -> None:
    assert follow(state, DRAINING, has_memory=True, empty=False) == DRAINING
    assert follow(state, DRAINING, has_memory=True, empty=True) == DORMANT


def test_a_dormant_engine_has_nothing_to_drain() -> None:
    assert follow(DORMANT, DRAINING, has_memory=False, empty=False) == DORMANT


def test_a_draining_engine_can_be_taken_back() -> None:
    assert follow(DRAINING, ACTIVE, has_memory=True, empty=False) == ACTIVE


@pytest.mark.parametrize("ordered", [DORMANT, ACTIVE, DRAINING])
@pytest.mark.parametrize("state", LeaseState)
def test_an_order_settles(state: LeaseState, ordered: LeaseState) -> None:
    """With memory, and turns that end, every order reaches a state it stays in."""
    for _ in range(3):
        state = follow(state, ordered, has_memory=True, empty=True)
    assert state == (ACTIVE if ordered == ACTIVE else DORMANT)
    assert follow(state, ordered, has_memory=True, empty=True) == state


def test_what_each_state_may_do() -> None:
    assert [state for state in LeaseState if holds_memory(state)] == [ACTIVATING, ACTIVE, DRAINING]
    assert [state for state in LeaseState if takes_turns(state)] == [ACTIVATING, ACTIVE]
