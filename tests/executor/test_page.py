from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import struct
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.executor.facts import MAX_BYTES, LeaseState, NodeOrders, RolloutFacts, ServingFacts
from rose.executor.page import (
    BELL,
    LAYOUT,
    SECTION,
    SIZE,
    VERSION,
    Page,
)

fork = multiprocessing.get_context("fork")
SERVING = ServingFacts(tick=7, ttft_s=1.0, tpot_s=0.1, kv_used=3, kv_quota=5, kv_max=9)
PATIENCE_S = 60.0
"""For what must happen, on a machine of any speed."""


def numbers(kind: type[msgspec.Struct], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Records that are plausible field by field."""
    fields = {
        field.name: st.floats(0, 3600) if field.type is float else st.integers(0, 1000)
        for field in msgspec.structs.fields(kind)
    }
    return st.builds(kind, **{**fields, **more})


serving_facts = numbers(
    ServingFacts,
    decode_deadline=st.just(math.inf) | st.floats(0, 1e9),
    prefill_deadline=st.just(math.inf) | st.floats(0, 1e9),
    ttft_s=st.floats(0.001, 3600),
    tpot_s=st.floats(0.001, 3600),
    kv_max=st.integers(1000, MAX_BYTES),
)
rollout_facts = numbers(RolloutFacts, kv_max=st.integers(1000, MAX_BYTES), state=st.integers(0, 3))
node_orders = numbers(
    NodeOrders,
    state=st.integers(0, 3),
    rule=st.integers(0, 4),
    memory_policy=st.integers(0, 1),
    error_budget=st.floats(0, 1),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(serving_facts, rollout_facts, node_orders)
def test_what_is_published_is_read(
    page: Page, serving: ServingFacts, rollout: RolloutFacts, node: NodeOrders
) -> None:
    page.publish("serving", serving)
    page.publish("rollout", rollout)
    page.publish("node", node)
    readings = page.serving(), page.rollout(), page.node()
    assert [reading and reading.facts for reading in readings] == [serving, rollout, node]
    assert all(reading and reading.writer.pid == os.getpid() for reading in readings)


def test_defaults_with_an_infinite_deadline_survive(page: Page) -> None:
    page.publish("serving", SERVING)
    reading = page.serving()
    assert reading is not None
    assert reading.facts.decode_deadline == math.inf
    assert not reading.facts.busy


def test_an_unwritten_section_is_none(page: Page) -> None:
    assert (page.serving(), page.rollout(), page.node()) == (None, None, None)
    assert not page.rollout_writer_alive()


def test_another_process_sees_the_page(page: Page) -> None:
    page.publish("rollout", RolloutFacts(tick=5, kv_claim=2, kv_max=9))
    other = Page.open(page.path)
    reading = other.rollout()
    assert reading is not None
    assert reading.facts.kv_claim == 2
    assert other.processes.alive(reading.writer)
    assert (other.kv_total, other.device) == (1 << 30, "cpu0")
    other.close()


def _hammer(path: Path, stop: Event) -> None:
    page = Page.open(path)
    tick = 0
    while not stop.is_set():
        tick += 1
        page.publish(
            "serving",
            msgspec.structs.replace(
                SERVING, tick=tick, kv_used=3 * tick, kv_need=5 * tick, kv_max=MAX_BYTES
            ),
        )


def test_a_reader_never_sees_a_mix_of_two_records(page: Page) -> None:
    stop = fork.Event()
    writer = fork.Process(target=_hammer, args=(page.path, stop), daemon=True)
    writer.start()
    read = 0
    ticks: set[int] = set()
    until = time.monotonic() + PATIENCE_S
    while (read < 5000 or len(ticks) < 50) and time.monotonic() < until:
        reading = page.serving()
        if reading is None:
            continue
        facts = reading.facts
        assert (facts.kv_used, facts.kv_need) == (3 * facts.tick, 5 * facts.tick)
        ticks.add(facts.tick)
        read += 1
    stop.set()
    writer.join(PATIENCE_S)
    assert read >= 5000
    assert len(ticks) >= 50


def _poke(page: Page, offset: int, data: bytes) -> None:
    with page.path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_writer_that_died_while_writing_leaves_nothing(page: Page) -> None:
    page.publish("serving", SERVING)
    _poke(page, SECTION["serving"], struct.pack("<I", 3))
    assert page.serving() is None
    page.publish("serving", SERVING)
    assert page.serving() is not None


@pytest.mark.parametrize("offset", [4, 24, 40, 60])
def test_a_wrong_checksum_leaves_nothing(page: Page, offset: int) -> None:
    page.publish("serving", SERVING)
    _poke(page, SECTION["serving"] + offset, b"\xa5\x5a\xa5")
    assert page.serving() is None


@pytest.mark.parametrize("length", [0, 100, 300, 1100])
def test_a_truncated_page_reads_as_none_and_heals(page: Page, length: int) -> None:
    rollout = RolloutFacts(tick=1, kv_max=9)
    page.publish("serving", SERVING)
    page.publish("rollout", rollout)
    os.truncate(page.path, length)
    assert page.serving() is None or length > 1000
    assert page.rollout() is None
    assert page.node() is None
    page.publish("serving", SERVING)
    page.publish("rollout", rollout)
    serving, healed = page.serving(), page.rollout()
    assert serving is not None
    assert serving.facts == SERVING
    assert healed is not None
    assert healed.facts == rollout


def test_bells_of_a_truncated_page_time_out_instead_of_failing(page: Page) -> None:
    os.truncate(page.path, 0)
    assert page.bell("gate") == 0
    assert page.wait("gate", 0, 0.01) is False
    page.ring("gate")
    assert page.bell("gate") != 0
    assert page.wait("gate", 0, PATIENCE_S)


def test_a_rollout_engine_behind_a_truncated_page_counts_as_alive(page: Page) -> None:
    """Else serving would take memory that a live engine still holds."""
    page.publish("rollout", RolloutFacts(tick=1, kv_claim=5, kv_max=9))
    os.truncate(page.path, 600)
    assert page.rollout() is None
    assert page.rollout_writer_alive()


@pytest.mark.parametrize("facts", [
    msgspec.structs.replace(SERVING, kv_used=-1),
    msgspec.structs.replace(SERVING, decode_deadline=math.nan),
    msgspec.structs.replace(SERVING, next_step_s=1e9),
    msgspec.structs.replace(SERVING, clear_s=math.inf),
    msgspec.structs.replace(SERVING, kv_max=MAX_BYTES + 1),
    msgspec.structs.replace(SERVING, kv_used=10),
    msgspec.structs.replace(SERVING, kv_quota=10),
    msgspec.structs.replace(SERVING, ttft_s=0.0),
    msgspec.structs.replace(SERVING, tpot_s=0.0),
    msgspec.structs.replace(SERVING, waiting=1_000_001),
])  # fmt: skip
def test_serving_facts_that_cannot_be_true_are_none(page: Page, facts: ServingFacts) -> None:
    page.publish("serving", facts)
    assert page.serving() is None


@pytest.mark.parametrize("facts", [
    RolloutFacts(kv_claim=10, kv_max=9),
    RolloutFacts(kv_claim=-1, kv_max=9),
    RolloutFacts(state=max(LeaseState) + 1),
    RolloutFacts(overhead_us=math.nan),
])  # fmt: skip
def test_rollout_facts_that_cannot_be_true_are_none(page: Page, facts: RolloutFacts) -> None:
    page.publish("rollout", facts)
    assert page.rollout() is None
    assert page.rollout_writer_alive()


def test_orders_that_cannot_be_true_are_none(page: Page) -> None:
    page.publish("node", NodeOrders(state=9))
    assert page.node() is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SECTION)), st.binary(min_size=1, max_size=400), st.integers(0, 300))
def test_garbage_in_a_section_never_raises(
    page: Page, section: str, garbage: bytes, at: int
) -> None:
    page.publish("serving", SERVING)
    _poke(page, SECTION[section] + at, garbage)
    for reading in (page.serving(), page.rollout(), page.node()):
        assert reading is None or reading.facts.implausible() is None


# ---- bells


def _ring_when_told(path: Path, told: Event) -> None:
    page = Page.open(path)
    told.wait(PATIENCE_S)
    time.sleep(0.05)
    page.ring("gate")


def test_a_bell_wakes_another_process(page: Page) -> None:
    told = fork.Event()
    ringer = fork.Process(target=_ring_when_told, args=(page.path, told), daemon=True)
    ringer.start()
    seen = page.bell("gate")
    told.set()
    woke = page.wait("gate", seen, PATIENCE_S)
    ringer.join(PATIENCE_S)
    assert woke
    assert page.bell("gate") != seen


def test_a_bell_that_rang_since_does_not_wait(page: Page) -> None:
    seen = page.bell("watch")
    page.ring("watch")
    assert page.wait("watch", seen, PATIENCE_S)


def test_a_bell_that_does_not_ring_times_out(page: Page) -> None:
    page.ring("serving")
    assert page.wait("gate", page.bell("gate"), 0.01) is False
    assert page.wait("gate", page.bell("gate"), 0.0) is False


def test_a_bell_shows_something_new_every_time_also_around_the_end(page: Page) -> None:
    page._rung = 0xFFFFFFFE
    shown = []
    for _ in range(4):
        page.ring("node")
        shown.append(page.bell("node"))
    assert shown == [0xFFFFFFFF, 0, 1, 2]


def test_the_layout_names_every_field() -> None:
    """Two builds whose facts differ must not attach to one page."""
    assert LAYOUT >> 24 == VERSION
    assert LAYOUT & 0xFFFFFF


def test_a_half_is_readable_at_every_moment_while_it_is_written(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer may wait for Python's lock, or be stopped, between any two calls of the kernel."""
    page.publish("serving", SERVING)
    write, seen = os.pwrite, []

    def watched(*args: Any) -> int:
        seen.append(page.serving())
        written = write(*args)
        seen.append(page.serving())
        return written

    monkeypatch.setattr(os, "pwrite", watched)
    page.publish("serving", replace(SERVING, tick=SERVING.tick + 1))
    assert None not in seen
    assert seen[-1].facts.tick == SERVING.tick + 1


def test_a_writer_is_not_believed_to_be_another_one(page: Page) -> None:
    page.publish("serving", SERVING)
    os.pwrite(page._fd, struct.pack("<Q", 1), SECTION["serving"] + 8)
    assert page.serving() is None


def test_describe_shows_everything_and_is_json(page: Page) -> None:
    page.publish("serving", SERVING)
    shown = json.loads(json.dumps(page.describe()))
    assert shown["device"] == "cpu0"
    assert shown["serving"]["alive"] is True
    assert shown["serving"]["kv_quota"] == 5
    assert shown["rollout"] is None
    assert set(shown["bells"]) == set(BELL)


def test_random_truncation_while_all_write_never_raises(page: Page) -> None:
    rng = random.Random(1)
    for _ in range(200):
        os.truncate(page.path, rng.randrange(SIZE))
        rng.choice([
            lambda: page.publish("serving", SERVING),
            lambda: page.publish("node", NodeOrders(1, 2)),
            lambda: page.ring("gate"),
            page.describe,
        ])()  # fmt: skip
    page.publish("serving", SERVING)
    assert page.serving() is not None
