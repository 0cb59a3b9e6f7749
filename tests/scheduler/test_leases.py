"""Leases and how many devices to hold: pure, and over HTTP with a node that the test plays."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.scheduler.conftest import call
from tests.scheduler.test_frontdoor import PROMPT, expected, in_background

from rose.scheduler.lease import AGAIN_S, LOST_S, Lease, Order, Phase, Word, lost, step
from rose.scheduler.provisioner import KEEP_S, PAUSE_S, Demand, Device, borrow, is_low


def word(at: float, *, active: bool = False, offered: bool = True) -> Word:
    return Word(at, active, offered)


def test_a_device_is_activated_used_and_drained() -> None:
    now, orders = 0.0, []
    lease = Lease()
    for active, wanted in [(False, True), (False, True), (True, True), (True, False), (True, False),
                           (False, False)]:  # fmt: skip
        now += 2.0
        lease, order = step(lease, word(now, active=active), wanted=wanted, now=now)
        orders.append((lease.phase, order))
    assert orders == [
        (Phase.ACTIVATING, Order.ACTIVATE),
        (Phase.ACTIVATING, None),
        (Phase.ACTIVE, None),
        (Phase.DRAINING, Order.DRAIN),
        (Phase.DRAINING, None),
        (Phase.DORMANT, None),
    ]


def test_what_serving_takes_back_is_not_asked_for_again() -> None:
    lease, order = step(Lease(Phase.ACTIVE), word(1.0, offered=False), wanted=True, now=1.0)
    assert (lease.phase, order) == (Phase.DORMANT, None)
    assert step(lease, word(3.0, offered=False), wanted=True, now=3.0) == (lease, None)
    assert step(lease, word(5.0), wanted=True, now=5.0)[1] == Order.ACTIVATE


def test_an_order_without_effect_is_given_again() -> None:
    lease = Lease(Phase.ACTIVATING, 0.0)
    assert step(lease, word(1.0), wanted=True, now=1.0)[1] is None
    assert step(lease, word(AGAIN_S), wanted=True, now=AGAIN_S)[1] == Order.ACTIVATE


def test_an_engine_that_others_activated_is_drained() -> None:
    lease, order = step(Lease(), word(1.0, active=True), wanted=False, now=1.0)
    assert (lease.phase, order) == (Phase.DRAINING, Order.DRAIN)


def test_silence_is_loss() -> None:
    assert not lost(word(0.0), LOST_S)
    assert lost(word(0.0), LOST_S + 1)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.floats(0.1, 60.0))),
)
def test_nothing_is_held_that_is_not_offered(
    words: list[tuple[bool, bool, bool, float]],
) -> None:
    lease, now = Lease(), 0.0
    for active, offered, wanted, later in words:
        now += later
        lease, order = step(
            lease, word(now, active=active, offered=offered), wanted=wanted, now=now
        )
        assert offered or (lease.phase == Phase.DORMANT and order is None)
        assert order != Order.ACTIVATE or wanted


# ---- how many


def device(id_: str, speed: float = 100.0, **more: Any) -> Device:
    return Device(**{"id": id_, "tokens_per_s": speed, "held": False} | more)


def test_borrow_for_a_backlog_and_give_back_after_it() -> None:
    devices = [device("mine", held=True, dedicated=True), device("slow", 50.0), device("fast")]
    backlog = Demand(tokens=900, waiting=50, most=2)
    assert borrow(backlog, devices, 0.0) == {"fast"}
    assert borrow(replace(backlog, tokens=10_000), devices, 0.0) == {"fast", "slow"}
    assert borrow(replace(backlog, tokens=10_000, most=1), devices, 0.0) == {"fast"}
    assert borrow(Demand(tokens=400, waiting=50, most=2), devices, 0.0) == set()
    devices = [devices[0], device("slow", 50.0, held=True), device("fast", held=True)]
    busy, tail = Demand(tokens=5_000, waiting=0, most=2), Demand(tokens=400, waiting=0, most=2)
    assert not is_low(busy, devices)
    assert borrow(replace(busy, low_since=None), devices, 0.0) == {"slow", "fast"}
    assert is_low(tail, devices)
    assert borrow(replace(tail, low_since=0.0), devices, KEEP_S - 1) == {"slow", "fast"}
    assert borrow(replace(tail, low_since=0.0), devices, KEEP_S) == {"fast"}


def test_never_more_than_allowed_and_never_at_once() -> None:
    devices = [device("a", held=True), device("b")]
    wants = Demand(tokens=1e9, waiting=99, most=1)
    assert borrow(wants, devices, 0.0) == {"a"}
    pausing = Demand(tokens=1e9, waiting=99, most=9, changed=0.0)
    assert borrow(pausing, devices, PAUSE_S / 2) == {"a"}
    assert borrow(pausing, devices, PAUSE_S) == {"a", "b"}


def test_what_is_taken_back_is_not_held() -> None:
    gone = device("a", held=True, offered=False)
    assert borrow(Demand(tokens=1e9, waiting=9, most=9), [gone], 0.0) == set()


def test_an_empty_job_holds_nothing() -> None:
    nothing = Demand(tokens=0, waiting=0, most=9, low_since=-KEEP_S)
    assert borrow(nothing, [device("a", held=True)], 0.0) == set()


# ---- over HTTP


def test_a_node_is_borrowed_for_a_turn_and_given_back(make_cluster: Any) -> None:
    """The engine is an emulated one; it is not on the scheduler's command line."""
    cluster = make_cluster(1, "--keep-s", "1", alone=True)
    engine = cluster.engines[0].url

    def say(**more: Any) -> Any:
        said = {"node": "n", "engine": engine, "active": False, "offered": True, "dedicated": False}
        status, answer = call(f"{cluster.url}/rose/v1/nodes", said | more)
        assert status == 200
        return answer["order"]

    assert say(places=8) is None
    assert call(f"{cluster.url}/rose/v1/status")[1]["engines"][0]["slots"] == 9
    going = in_background(lambda: cluster.generate(PROMPT, 10))
    deadline = time.monotonic() + 20
    while (order := say()) != "activate":
        assert order is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert not going.done()
    say(active=True)
    status, answer = going.result()
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected(PROMPT, 10))
    while (order := say(active=True)) != "drain":
        assert order is None and time.monotonic() < deadline
        time.sleep(0.1)
    _, found = call(f"{cluster.url}/rose/v1/status")
    assert found["engines"][0]["lease"] == "draining"
    assert say(offered=False) is None
    assert call(f"{cluster.url}/rose/v1/nodes", {"node": 3})[0] == 400


def test_a_node_that_waits_hears_of_an_order_at_once(make_cluster: Any) -> None:
    cluster = make_cluster(1, alone=True)
    said = {"node": "n", "engine": cluster.engines[0].url, "active": False, "offered": True,
            "dedicated": False}  # fmt: skip
    assert call(f"{cluster.url}/rose/v1/nodes", said)[1]["order"] is None
    waiting = in_background(lambda: call(f"{cluster.url}/rose/v1/nodes", said | {"wait_s": 10}))
    going = in_background(lambda: cluster.generate(PROMPT, 10))
    assert waiting.result()[1]["order"] == "activate"
    call(f"{cluster.url}/rose/v1/nodes", said | {"active": True})
    assert going.result()[0] == 200
