"""Serving keeps to the rollout engine's claim until that engine is certainly gone."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.executor.neighbours import Blocks, Table

from rose.executor import lender, processes
from rose.executor.facts import RolloutFacts
from rose.executor.lender import Lender
from rose.executor.memory import may_use
from rose.executor.page import SECTION, Page, PageError
from rose.executor.processes import Kernel, Writer

TOTAL = 100
ROLLOUT, ANOTHER = Writer(12, 1), Writer(14, 1)


class Scene:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes = Table()
        self.page = self.open(Writer(11, 1))
        self.rollout = self.open(ROLLOUT)
        self.blocks = Blocks(TOTAL, usable=TOTAL)
        self.lender = self.start()

    def open(self, writer: Writer) -> Page:
        return Page.create(
            self.path, kv_total=TOTAL, device="d", me=writer, processes=self.processes
        )

    def start(self, slice_bytes: int = TOTAL) -> Lender:
        return Lender(
            self.page, self.blocks, 0.2, threading.Lock(), slice_bytes=slice_bytes, owns=True
        )

    def claims(self, claim: int, revision: int, page: Page | None = None) -> None:
        facts = RolloutFacts(kv_claim=claim, kv_revision=revision, kv_max=TOTAL)
        (page or self.rollout).publish("rollout", facts)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "page")


@pytest.fixture
def lent(scene: Scene) -> Scene:
    scene.claims(60, 7)
    assert scene.lender.respect()
    assert (scene.blocks.usable, scene.lender.revision) == (40, 7)
    return scene


def test_a_claim_is_acknowledged_once_the_quota_is_in_force(scene: Scene) -> None:
    scene.blocks.used = 70
    scene.claims(60, 7)
    assert not scene.lender.respect()
    assert (scene.blocks.usable, scene.lender.revision) == (70, 0)
    scene.blocks.used = 30
    assert scene.lender.respect()
    assert (scene.blocks.usable, scene.lender.revision) == (40, 7)
    assert not scene.lender.respect()  # no news


def test_memory_is_parked_slice_by_slice(scene: Scene) -> None:
    lender = scene.start(slice_bytes=25)
    scene.claims(60, 7)
    seen = []
    while not lender.respect(force=lender.handing_over):
        seen.append((scene.blocks.usable, lender.handing_over))
    assert seen == [(75, True), (50, True)]
    assert (scene.blocks.usable, lender.handing_over) == (40, False)


def test_a_lying_claim_never_takes_the_headroom(scene: Scene) -> None:
    scene.claims(100, 7)
    scene.lender.respect()
    assert scene.blocks.usable == 20


def test_memory_is_given_back_at_once_and_its_pages_are_brought_slice_by_slice(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is missing is brought by the engine's own step, while its users wait."""
    monkeypatch.setattr(lender, "BRING", 25)
    scene.blocks.usable = scene.blocks.backed = 40
    seen = []
    while scene.lender.bringing or not seen:
        for _ in range(3):  # what else there is to look at makes it no faster
            now = 1000.0 + len(seen) * lender.BRING_S
            scene.lender.look(lambda now=now: now, lambda _: None, lambda _: None)
        seen.append((scene.blocks.usable, scene.blocks.backed))
    assert seen == [(100, 65), (100, 90), (100, 100)]


def torn(page: Page) -> None:
    os.pwrite(page._fd, struct.pack("<I", 3), SECTION["rollout"])


def emptied(page: Page) -> None:
    os.pwrite(page._fd, bytes(512), SECTION["rollout"])


def lying(page: Page) -> None:
    page.publish("rollout", RolloutFacts(kv_claim=-1))


def cut_off(page: Page) -> None:
    os.truncate(page.path, 0)


unreadable = pytest.mark.parametrize("damage", [torn, emptied, lying, cut_off])
Damage = Callable[[Page], None]


@unreadable
def test_what_a_live_engine_claims_is_kept_while_it_cannot_be_read(
    lent: Scene, damage: Damage
) -> None:
    damage(lent.rollout)
    assert not lent.lender.respect()
    assert (lent.blocks.usable, lent.lender.revision) == (40, 7)
    lent.claims(50, 8)
    assert lent.lender.respect()
    assert lent.blocks.usable == 50


@unreadable
def test_what_a_dead_engine_claimed_is_taken_whatever_its_half_says(
    lent: Scene, damage: Damage
) -> None:
    damage(lent.rollout)
    lent.processes.dead.add(ROLLOUT)
    if damage is cut_off:  # another's may be here by now: nobody can read who it is
        lent.lender.respect()
        assert lent.blocks.usable == 20
        lent.page.mend(lambda: 0.0)
    assert lent.lender.respect()
    assert lent.blocks.usable == TOTAL


def test_an_engine_that_dies_claims_nothing(lent: Scene) -> None:
    lent.processes.dead.add(ROLLOUT)
    assert lent.lender.respect()
    assert (lent.blocks.usable, lent.lender.claim) == (TOTAL, 0)


@pytest.mark.parametrize("damage", [torn, lying, cut_off])
def test_a_restarted_serving_engine_assumes_the_worst_of_one_it_never_read(
    lent: Scene, damage: Damage
) -> None:
    damage(lent.rollout)
    lent.blocks.usable = TOTAL
    lender = lent.start()
    lender.respect(force=True)
    assert lent.blocks.usable == 20


def test_another_engine_in_its_place_counts_instead(lent: Scene) -> None:
    lent.processes.dead.add(ROLLOUT)
    lent.claims(30, 9, lent.open(ANOTHER))
    assert lent.lender.respect()
    assert (lent.blocks.usable, lent.lender.claimant) == (70, ANOTHER)


@pytest.fixture
def kernel_page(tmp_path: Path) -> Iterator[Page]:
    page = Page.create(tmp_path / "real", kv_total=TOTAL, device="d")
    yield page
    page.close()


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("asked_before", [True, False])
def test_without_descriptors_nobody_is_taken_for_dead(
    kernel_page: Page, monkeypatch: pytest.MonkeyPatch, readable: bool, asked_before: bool
) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    blocks = Blocks(TOTAL, usable=TOTAL)
    lender = Lender(kernel_page, blocks, 0.2, threading.Lock(), slice_bytes=TOTAL, owns=True)
    kernel_page.publish("rollout", RolloutFacts(kv_claim=60, kv_revision=7, kv_max=TOTAL))
    if asked_before:
        assert lender.respect()
    monkeypatch.setattr(processes, "process_start", none_left)
    monkeypatch.setattr(processes.os, "pidfd_open", none_left)
    kernel_page.processes = Kernel()
    if not readable:
        torn(kernel_page)
    lender.respect()
    worst = not asked_before and not readable
    assert blocks.usable == (20 if worst else 40)


Acts = st.lists(
    st.tuples(
        st.sampled_from(["claim", "claim", "tear", "empty", "lie", "cut", "die", "serve"]),
        st.integers(0, TOTAL),
    ),
    max_size=30,
)


@given(Acts)
def test_the_two_never_hold_more_than_the_device_has_whatever_happens_to_the_page(
    acts: list[tuple[str, int]],
) -> None:
    descriptor = os.memfd_create("page")
    scene = Scene(Path(f"/proc/self/fd/{descriptor}"))
    lives, claim, held, revision = True, 0, 0, 0
    harm = {"tear": torn, "empty": emptied, "lie": lying, "cut": cut_off}
    for act, value in acts:
        if act == "claim" and lives:
            claim, revision = min(value, 80), revision + 1
            held = min(held, claim)
            scene.claims(claim, revision)
        elif act in harm:
            harm[act](scene.rollout)
        elif act == "die":
            lives, held = False, 0
            scene.processes.dead.add(ROLLOUT)
        elif act == "serve":
            scene.blocks.used = min(value, scene.blocks.usable)
        scene.lender.respect()
        quota = scene.blocks.usable_bytes
        if lives and may_use(claim, revision, scene.lender.revision, quota, TOTAL):
            held = claim
        assert held + quota <= TOTAL
    for page in (scene.page, scene.rollout):
        page.close()
    os.close(descriptor)


def test_serving_mends_a_damaged_page_of_which_no_node_takes_care(scene: Scene) -> None:
    os.pwrite(scene.page._fd, b"not a rose page", 0)
    with pytest.raises(PageError, match="not a rose control page"):
        scene.open(ANOTHER)
    scene.lender.look(lambda: 1000.0, lambda _: None, lambda _: None)
    scene.open(ANOTHER).close()
