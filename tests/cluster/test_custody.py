"""Whose the device is: the owner's word first, and orders that count up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.cluster.custody import Custody, Sharing, TakenBack, carried_out, has_memory_back
from rose.executor.facts import LeaseState, NodeOrders, RolloutFacts, ServingFacts

ACTIVE, DORMANT, DRAINING = LeaseState.ACTIVE, LeaseState.DORMANT, LeaseState.DRAINING
HELD = RolloutFacts(state=ACTIVE, epoch=7, kv_claim=5, kv_max=9)

Words = st.lists(
    st.sampled_from(["take back", "lend", "activate", "drain", "revoke", "engine", "node"]),
    max_size=30,
)


@given(Words)
def test_what_was_taken_back_is_dormant_until_it_is_lent_again(words: list[str]) -> None:
    custody, taken = Custody(), False
    orders = {"activate": ACTIVE, "drain": DRAINING, "revoke": DORMANT}
    for word in words:
        before = custody.orders(Sharing(), 1.0)
        if word == "take back":
            custody.take_back()
            taken = True
        elif word == "lend":
            custody.lend()
            taken = False
        elif word == "engine":
            custody.engine_started()
            assert (custody.cold, custody.state) == (True, DORMANT)
        elif word == "node":
            custody = Custody()
            custody.recall(before, taken_back=False, held=HELD)
        elif taken and word != "revoke":
            with pytest.raises(TakenBack, match="lend it again"):
                custody.order(orders[word])
            assert custody.orders(Sharing(), 1.0) == before
        else:
            custody.order(orders[word])
        after = custody.orders(Sharing(), 1.0)
        assert after.offered == (not taken)
        assert after.epoch > before.epoch or after.state == before.state
        if taken:
            assert after.state == DORMANT


@pytest.mark.parametrize("on_page", [None, 0, 1])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("held", [None, HELD])
def test_the_page_says_whether_it_was_taken_back_and_else_the_disk_does(
    on_page: int | None, on_disk: bool, held: RolloutFacts | None
) -> None:
    left = None if on_page is None else NodeOrders(epoch=4, offered=on_page, state=ACTIVE)
    custody = Custody()
    custody.recall(left, taken_back=on_disk, held=held)
    assert custody.offered == (not on_disk if on_page is None else on_page == 1)
    kept = custody.offered and held is not None
    assert custody.state == (ACTIVE if kept else DORMANT)
    assert custody.cold == (held is None)


def test_a_restarted_node_counts_on_from_what_was_ordered_and_from_what_was_done() -> None:
    custody = Custody()
    custody.recall(NodeOrders(epoch=9), taken_back=False, held=HELD)
    assert custody.epoch == 10
    custody.recall(None, taken_back=False, held=HELD)  # the orders are lost, the engine is not
    assert custody.epoch == HELD.epoch + 1


def test_orders_say_how_the_device_is_shared() -> None:
    custody = Custody()
    custody.order(ACTIVE)
    sharing = Sharing(1, 2, 1, 3.0, 4.0, 0.5)
    said = custody.orders(sharing, 99.0)
    assert said == NodeOrders(1, 99.0, 1, ACTIVE, 1, 2, 1, 3.0, 4.0, 0.5)
    assert said.implausible() is None


# ---- when an order is carried out

DONE = RolloutFacts(state=DORMANT, epoch=7, kv_max=9)


@pytest.mark.parametrize(
    "open_end",
    [
        {"kv_claim": 1},
        {"kv_resident": 1},
        {"running": 1},
        {"waiting": 1},
        {"epoch": 6},
        {"state": LeaseState.ACTIVATING},
        {"state": ACTIVE},
        {"state": DRAINING},
    ],
)
def test_an_engine_is_dormant_once_nothing_is_left_of_its_lease(open_end: dict[str, int]) -> None:
    assert carried_out(DORMANT, 7, DONE)
    facts = RolloutFacts(**{"state": DORMANT, "epoch": 7, "kv_max": 9, **open_end})
    assert not carried_out(DORMANT, 7, facts)


def test_an_engine_is_active_when_it_says_so_and_draining_when_it_knows() -> None:
    assert carried_out(ACTIVE, 7, HELD)
    assert not carried_out(ACTIVE, 8, HELD)
    assert not carried_out(ACTIVE, 7, RolloutFacts(state=LeaseState.ACTIVATING, epoch=7))
    assert carried_out(DRAINING, 7, HELD)
    assert not carried_out(DRAINING, 8, HELD)


def test_serving_has_its_memory_back_when_it_may_use_all_that_it_can() -> None:
    assert has_memory_back(ServingFacts(kv_quota=100, kv_max=200), 100)
    assert not has_memory_back(ServingFacts(kv_quota=99, kv_max=200), 100)
    assert has_memory_back(ServingFacts(kv_quota=80, kv_max=80), 100)
