"""The rollout engine's standing: orders that grow old, serving unseen, memory handed over."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.executor.neighbours import Blocks, Clock, Table

from rose.executor.admission import RULES
from rose.executor.borrower import NODE_GRACE_S, Borrower, terms_of
from rose.executor.facts import (
    LeaseState,
    MemoryPolicy,
    NodeOrders,
    RolloutFacts,
    Rule,
    ServingFacts,
)
from rose.executor.memory import POLICIES, UNSEEN_S, MemoryTerms
from rose.executor.page import SECTION, Page, PageError
from rose.executor.processes import Writer

TOTAL = 100
ACTIVE, DORMANT, DRAINING = LeaseState.ACTIVE, LeaseState.DORMANT, LeaseState.DRAINING
ORDERS = NodeOrders(epoch=5, state=ACTIVE)


class Scene:
    """A node, a serving engine that acknowledges, and the rollout engine's standing."""

    def __init__(self, path: Path, *, dedicated: bool = False) -> None:
        self.clock = Clock()
        self.page = Page.create(
            path, kv_total=TOTAL, device="d", me=Writer(11, 1), processes=Table()
        )
        self.blocks = Blocks(80)
        self.published = 0
        self.ended = 0
        self.voided: list[int] = []
        """Blocks that were usable when what had been granted became void."""
        terms = MemoryTerms(TOTAL, 0.2, "aimd", 80)
        self.borrower = Borrower(
            self.page,
            self.blocks,
            self.publish,
            terms,
            dedicated=dedicated,
            clock=self.clock,
            void=lambda: self.voided.append(self.blocks.usable),
        )
        self.border = self.borrower.border

    def publish(self) -> None:
        self.published += 1
        facts = RolloutFacts(
            kv_claim=self.border.claim, kv_revision=self.border.revision, kv_max=TOTAL
        )
        self.page.publish("rollout", facts)

    def orders(self, **changes: float) -> None:
        self.page.publish("node", replace(ORDERS, **{"written": self.clock.now, **changes}))

    def serving(self, *, need: int = 0, warm: int = 0, acks: bool = True) -> None:
        facts = ServingFacts(
            written=self.clock.now,
            ttft_s=1.0,
            tpot_s=0.1,
            kv_need=need,
            kv_warm=warm,
            kv_quota=TOTAL - self.border.claim,
            kv_acked=self.border.revision if acks else 0,
            kv_max=TOTAL,
        )
        self.page.publish("serving", facts)

    def make_room(self, blocks: int) -> None:
        self.ended += blocks
        self.blocks.used -= blocks

    def look(self, *, empty: bool = True, between: bool = True, useful: int = TOTAL) -> bool:
        """As the thread aside and (`between` steps) the engine's own do; whether it was news."""
        news = self.borrower.follow_orders(empty=empty)
        moved = self.borrower.follow_memory(useful, self.make_room if between else None)
        return self.borrower.follow_orders(empty=empty) or news or moved

    def active(self) -> None:
        for _ in range(2):
            self.orders()
            self.serving()
            self.look()
        assert self.borrower.state == ACTIVE
        assert self.blocks.usable == 80


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "page")


def test_a_new_engine_is_dormant_and_holds_nothing(scene: Scene) -> None:
    assert not scene.look()
    assert (scene.borrower.state, scene.borrower.may_run) == (DORMANT, False)
    assert (scene.blocks.usable, scene.border.claim) == (0, 0)


def test_it_is_active_once_it_has_memory(scene: Scene) -> None:
    scene.orders()
    scene.serving(acks=False)
    assert scene.look()
    assert scene.borrower.state == LeaseState.ACTIVATING
    assert (scene.border.claim, scene.blocks.usable) == (80, 0)
    assert not scene.borrower.may_run
    scene.serving()
    assert scene.look()
    assert (scene.borrower.state, scene.blocks.usable) == (ACTIVE, 80)
    assert scene.borrower.epoch == ORDERS.epoch


def test_orders_that_nobody_repeats_end(scene: Scene) -> None:
    scene.active()
    for _ in range(10):
        scene.clock.now += NODE_GRACE_S
        scene.orders()
        scene.serving()
        scene.look()
        assert scene.borrower.state == ACTIVE
    scene.clock.now += NODE_GRACE_S
    scene.serving()
    scene.look()
    assert scene.borrower.state == ACTIVE
    scene.clock.now += 0.001
    scene.serving()
    assert scene.look()
    assert (scene.borrower.state, scene.border.claim, scene.blocks.usable) == (DORMANT, 0, 0)
    scene.orders()
    assert scene.look()
    assert scene.borrower.state == LeaseState.ACTIVATING  # whoever speaks again is heard


@pytest.mark.parametrize("written", [0.0, 1000.0 - NODE_GRACE_S - 0.001, 1000.001, 1e9, math.inf])
def test_orders_of_another_time_are_not_carried_out(scene: Scene, written: float) -> None:
    scene.orders(written=written)
    scene.serving()
    scene.look()
    assert scene.borrower.state == DORMANT
    assert scene.border.claim == 0


@pytest.mark.parametrize("state", list(LeaseState))
def test_a_device_that_was_taken_back_is_dormant_whatever_else_is_ordered(
    scene: Scene, state: LeaseState
) -> None:
    scene.active()
    scene.orders(offered=0, state=state, epoch=6)
    assert scene.look(empty=False)
    assert scene.borrower.state == DORMANT
    assert (scene.border.claim, scene.blocks.usable) == (0, 0)
    assert scene.borrower.epoch == 6


def test_draining_waits_for_the_turns(scene: Scene) -> None:
    scene.active()
    scene.orders(state=DRAINING)
    scene.look(empty=False)
    assert (scene.borrower.state, scene.borrower.may_run) == (DRAINING, True)
    scene.look(empty=True)
    assert (scene.borrower.state, scene.border.claim) == (DORMANT, 0)


def test_orders_that_cannot_be_read_stay_as_they_were_until_they_are_old(scene: Scene) -> None:
    scene.active()
    os.pwrite(scene.page._fd, struct.pack("<I", 3), SECTION["node"])
    scene.clock.now += NODE_GRACE_S
    scene.serving()
    assert not scene.look()
    assert scene.borrower.state == ACTIVE
    scene.clock.now += 0.001
    scene.look()
    assert (scene.borrower.state, scene.border.claim) == (DORMANT, 0)


def test_what_was_taken_back_stays_so_when_the_orders_are_lost(scene: Scene) -> None:
    scene.active()
    scene.orders(offered=0, epoch=6)
    scene.look()
    os.truncate(scene.page.path, 0)
    scene.look()
    assert (scene.borrower.state, scene.borrower.epoch) == (DORMANT, 6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_terms_are_the_orders(scene: Scene, rule: str, policy: str) -> None:
    numbers = {"rule": Rule[rule.upper()], "memory_policy": MemoryPolicy[policy.upper()]}
    scene.orders(preempt_us=2500, error_budget=0.25, **numbers)
    scene.look()
    terms = scene.borrower.terms
    assert (terms.rule, terms.preempt_s, terms.error_budget) == (rule, 0.0025, 0.25)
    assert terms_of(NodeOrders()).preempt_s is None
    assert scene.borrower._memory.policy == policy


def test_every_number_of_an_order_is_a_rule_or_a_policy() -> None:
    assert [rule.name.lower() for rule in Rule] == list(RULES)
    assert [policy.name.lower() for policy in MemoryPolicy] == list(POLICIES)


# ---- beside a serving engine that cannot be seen


@pytest.mark.parametrize("rival", [False, True])
def test_memory_goes_back_when_serving_has_not_been_seen_for_a_while(
    scene: Scene, rival: bool
) -> None:
    scene.active()

    def later(seconds: float) -> None:
        scene.clock.now += seconds
        scene.orders()
        if rival:
            scene.page.intrude(scene.clock.now)
            scene.serving()
        scene.look()

    later(UNSEEN_S)
    assert scene.border.claim == 80
    later(0.001)
    assert (scene.border.claim, scene.blocks.usable, scene.border.may) == (0, 0, 0)


def test_a_serving_engine_that_is_seen_again_in_time_has_cost_nothing(scene: Scene) -> None:
    scene.active()
    scene.blocks.used = 50
    for _ in range(5):
        scene.clock.now += UNSEEN_S
        scene.orders()
        scene.look()
        scene.serving()
        scene.look()
    assert (scene.border.claim, scene.border.cuts, scene.ended) == (80, 0, 0)


def test_beside_a_serving_engine_never_seen_nothing_is_claimed(scene: Scene) -> None:
    scene.orders()
    scene.look()
    assert (scene.borrower.state, scene.border.claim) == (LeaseState.ACTIVATING, 0)


def test_a_device_without_serving_asks_nobody(tmp_path: Path) -> None:
    alone = Scene(tmp_path / "alone", dedicated=True)
    alone.borrower._memory = MemoryTerms(TOTAL, 0.0, "aimd", 80)
    for _ in range(5):
        alone.orders()
        alone.look()
        alone.clock.now += 1.0
    assert (alone.borrower.state, alone.blocks.usable) == (ACTIVE, 80)


# ---- the border


def test_growth_waits_for_the_acknowledgement_of_this_very_claim(scene: Scene) -> None:
    scene.orders()
    scene.serving(acks=False)
    scene.look(useful=40)
    scene.look(useful=40)
    assert (scene.border.claim, scene.blocks.usable, scene.border.grown) == (40, 0, 0)
    scene.serving()
    scene.look(useful=60)  # claims more before it saw that the first claim is acknowledged
    assert (scene.border.claim, scene.blocks.usable) == (60, 0)
    scene.serving()
    scene.look(useful=60)
    assert (scene.blocks.usable, scene.border.grown) == (60, 1)


def test_what_was_granted_beside_less_memory_is_void_before_there_is_more(scene: Scene) -> None:
    scene.active()
    assert scene.voided == [0]
    scene.serving(need=60)
    scene.look()
    assert (scene.blocks.usable, scene.voided) == (30, [0])
    scene.serving()
    scene.look()
    assert scene.voided == [0]  # claimed, and not acknowledged yet
    scene.clock.now += 2.0
    for _ in range(3):
        scene.orders()
        scene.serving()
        scene.look()
    assert scene.blocks.usable > 30
    assert scene.voided[:2] == [0, 30]


def test_blocks_in_use_are_given_back_between_two_steps(scene: Scene) -> None:
    scene.active()
    scene.blocks.used = 70
    scene.serving(need=60)
    scene.look(between=False)
    assert (scene.blocks.usable, scene.border.claim, scene.border.owes) == (70, 70, True)
    assert scene.ended == 0
    scene.look(between=True)
    assert (scene.blocks.usable, scene.border.claim, scene.border.owes) == (30, 30, False)
    assert scene.ended == 40


def test_a_lower_claim_is_said_after_the_memory_is_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.active()
    held: list[tuple[int, int]] = []
    monkeypatch.setattr(
        scene.border, "_publish", lambda: held.append((scene.blocks.usable, scene.border.claim))
    )
    scene.serving(need=60)
    scene.look()
    assert held == [(30, 30)]


def test_how_long_giving_back_takes_is_remembered_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.active()
    assert scene.border.give_back_s == 0.0

    make_room = scene.make_room

    def slow(blocks: int) -> None:
        scene.clock.now += 0.25
        make_room(blocks)

    monkeypatch.setattr(scene, "make_room", slow)
    scene.blocks.used = 70
    scene.serving(need=60)
    scene.look()
    assert scene.border.give_back_s == 0.25
    assert scene.border.reclaim_ms == 250.0


def test_a_restarted_engine_never_counts_its_claims_from_the_start(scene: Scene) -> None:
    scene.active()
    scene.clock.now += 1.0
    again = Borrower(
        scene.page,
        Blocks(80),
        lambda: None,
        MemoryTerms(TOTAL),
        dedicated=False,
        clock=scene.clock,
    )
    assert again.border.revision > scene.border.revision


Acts = st.lists(
    st.tuples(
        st.sampled_from(["order", "off", "take back", "serve", "ack", "tear", "use", "wait"]),
        st.integers(0, TOTAL),
    ),
    max_size=40,
)


@given(Acts)
def test_whatever_happens_a_claim_covers_what_is_held(acts: list[tuple[str, int]]) -> None:
    descriptor = os.memfd_create("page")
    scene = Scene(Path(f"/proc/self/fd/{descriptor}"))
    heard = scene.clock.now - 2 * NODE_GRACE_S
    for act, value in acts:
        if act == "order":
            scene.orders()
            heard = scene.clock.now
        elif act in ("off", "take back"):
            scene.orders(**({"state": DORMANT} if act == "off" else {"offered": 0}))
        elif act in ("serve", "ack"):
            scene.serving(need=value, acks=act == "ack")
        elif act == "tear":
            os.pwrite(scene.page._fd, struct.pack("<I", 3), SECTION["node"])
        elif act == "use":
            scene.blocks.used = min(value, scene.blocks.usable)
        else:
            scene.clock.now += value / 20
        scene.look(between=value % 2 == 0)
        assert scene.border.claim >= scene.blocks.usable
        if scene.clock.now - heard > NODE_GRACE_S:
            assert scene.borrower.state == DORMANT
            assert scene.border.claim <= scene.blocks.used
    scene.page.close()
    os.close(descriptor)


def test_an_abandoned_engine_mends_the_page_for_the_next_node(scene: Scene) -> None:
    scene.active()
    os.pwrite(scene.page._fd, b"not a rose page", 0)
    scene.look()
    with pytest.raises(PageError, match="not a rose control page"):
        Page.open(scene.page.path)
    scene.clock.now += NODE_GRACE_S + 0.001
    scene.look()
    Page.open(scene.page.path).close()
