"""The hand-over of KV memory, in every interleaving.

A model of the two engines around `may_use` and `serving_quota`, small enough to visit every state:
what each engine does between two looks at the page is one step, reads go stale, requests may hold
blocks so that a quota is not reached, and either engine dies and comes back at any moment. In no
state may the two together hold more than the device has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.executor.memory import may_use, serving_quota


class World(NamedTuple):
    # The page: claim and revision by rollout, quota and acknowledged revision by serving.
    claim: int = 0
    revision: int = 0
    quota: int = 0
    acked: int = 0
    # The rollout engine.
    rollout_lives: int = 0
    rollout_up: bool = False
    usable: int = 0
    my_claim: int = 0
    my_revision: int = 0
    unpublished: bool = False
    """Lowered, but the page does not say so yet."""
    seen_quota: int = 0
    seen_acked: int = -1
    """-1: no reading of a live serving engine."""
    left_behind: int = 0
    """Memory of an earlier rollout engine that is not gone yet."""
    # The serving engine.
    serving_lives: int = 0
    serving_up: bool = False
    serving_usable: int = 0
    my_acked: int = 0
    seen_claim: int = -1
    """-1: nothing read that is not carried out."""
    seen_revision: int = 0

    @property
    def held(self) -> int:
        return self.usable + self.left_behind + self.serving_usable


@dataclass(frozen=True)
class Protocol:
    """The protocol as documented; each flag is a way to get it wrong."""

    total: int = 2
    claims: int = 3
    """Changes of the claim in one history."""
    lives: int = 2
    """Times each engine lives."""
    floor: float = 0.0
    use_before_ack: bool = False
    ignore_revision: bool = False
    publish_before_lowering: bool = False
    revisions_start_anew: bool = False
    restart_beside_the_old: bool = False
    serving_boots_with_all: bool = False

    def successors(self, w: World) -> Iterator[World]:
        yield from self._rollout(w) if w.rollout_up else self._rollout_start(w)
        yield from self._serving(w) if w.serving_up else self._serving_start(w)

    def _rollout_start(self, w: World) -> Iterator[World]:
        if w.rollout_lives < self.lives:
            revision = 0 if self.revisions_start_anew else w.revision + 1
            yield w._replace(
                rollout_up=True,
                rollout_lives=w.rollout_lives + 1,
                claim=0,
                revision=revision,
                my_claim=0,
                my_revision=revision,
                seen_acked=-1,
            )

    def _rollout(self, w: World) -> Iterator[World]:
        crashed = w._replace(rollout_up=False, usable=0, unpublished=False, seen_acked=-1)
        yield crashed
        if self.restart_beside_the_old:
            yield from self._rollout_start(crashed._replace(left_behind=w.usable))
        if w.unpublished:
            yield w._replace(unpublished=False, claim=w.my_claim, revision=w.my_revision)
            return
        if w.serving_up:
            yield w._replace(seen_quota=w.quota, seen_acked=w.acked)
        if w.my_revision < self.claims + w.rollout_lives:
            most = self.total - int(self.floor * self.total)
            for wanted in range(most + 1):
                if wanted == w.my_claim:
                    continue
                changed = w._replace(my_claim=wanted, my_revision=w.my_revision + 1)
                if wanted >= w.usable or self.publish_before_lowering:
                    yield changed._replace(claim=wanted, revision=changed.my_revision)
                else:
                    yield changed._replace(usable=wanted, unpublished=True)
        if self.publish_before_lowering and w.usable > w.my_claim:
            yield w._replace(usable=w.my_claim)
        acked = w.my_revision if self.ignore_revision else w.seen_acked
        if w.usable < w.my_claim and (
            self.use_before_ack
            or (
                w.seen_acked >= 0
                and may_use(w.my_claim, w.my_revision, acked, w.seen_quota, self.total)
            )
        ):
            yield w._replace(usable=w.my_claim)

    def _serving_start(self, w: World) -> Iterator[World]:
        if w.serving_lives < self.lives:
            yield w._replace(
                serving_up=True,
                serving_lives=w.serving_lives + 1,
                serving_usable=self.total if self.serving_boots_with_all else 0,
                my_acked=0,
                seen_claim=w.claim if w.rollout_up else 0,
                seen_revision=w.revision if w.rollout_up else 0,
            )

    def _serving(self, w: World) -> Iterator[World]:
        yield w._replace(serving_up=False, serving_usable=0, seen_claim=-1)
        yield w._replace(quota=w.serving_usable, acked=w.my_acked)
        if w.seen_claim < 0:
            yield w._replace(
                seen_claim=w.claim if w.rollout_up else 0,
                seen_revision=w.revision if w.rollout_up else 0,
            )
            return
        quota = serving_quota(self.total, w.seen_claim, self.floor, self.total)
        done = w._replace(serving_usable=quota, my_acked=w.seen_revision, seen_claim=-1)
        yield done
        for stuck in range(quota + 1, w.serving_usable + 1):
            yield w._replace(serving_usable=stuck, seen_claim=-1)


def explore(protocol: Protocol) -> tuple[World | None, int]:
    """The first state that holds too much, and the most that rollout ever had."""
    seen = {World()}
    queue = deque(seen)
    most = 0
    while queue:
        world = queue.popleft()
        most = max(most, world.usable)
        if world.held > protocol.total:
            return world, most
        for after in protocol.successors(world):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return None, most


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_no_interleaving_holds_more_than_the_device_has(floor: float) -> None:
    protocol = Protocol(floor=floor)
    too_much, most = explore(protocol)
    assert too_much is None
    assert most == protocol.total - int(floor * protocol.total)


@settings(max_examples=150)
@given(st.sampled_from([0.0, 0.2, 0.5]), st.lists(st.integers(0, 999), max_size=150))
def test_no_long_history_holds_more_than_the_device_has(floor: float, choices: list[int]) -> None:
    protocol = Protocol(total=6, claims=1000, lives=1000, floor=floor)
    world = World()
    for choice in choices:
        options = list(protocol.successors(world))
        world = options[choice % len(options)]
        assert world.held <= protocol.total


@pytest.mark.parametrize(
    "mistake",
    [
        "use_before_ack",
        "ignore_revision",
        "publish_before_lowering",
        "revisions_start_anew",
        "restart_beside_the_old",
        "serving_boots_with_all",
    ],
)
def test_a_mistake_in_the_protocol_is_caught(mistake: str) -> None:
    too_much, _ = explore(replace(Protocol(), **{mistake: True}))
    assert too_much is not None
