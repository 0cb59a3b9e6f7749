"""The page as a file: files that are none, making one, taking one over, mending one."""

from __future__ import annotations

import multiprocessing
import os
import struct
from dataclasses import replace as changed
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec
import pytest

from rose.executor.facts import RolloutFacts, ServingFacts
from rose.executor.page import LAYOUT, SIZE, Page, PageError

fork = multiprocessing.get_context("fork")
SERVING = ServingFacts(tick=7, ttft_s=1.0, tpot_s=0.1, kv_used=3, kv_quota=5, kv_max=9)
PATIENCE_S = 60.0
"""For what must happen, on a machine of any speed."""

# ---- files that are no page


def test_a_missing_page_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="nowhere"):
        Page.open(tmp_path / "nowhere")
    with pytest.raises(PageError, match="nowhere"):
        Page.create(tmp_path / "nowhere" / "page", kv_total=1, device="d")


def test_a_foreign_file_is_an_error_and_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(b"chapter one" * 500)
    with pytest.raises(PageError, match=r"thesis\.txt is not a rose control page"):
        Page.open(path)
    with pytest.raises(PageError, match=r"thesis\.txt is not a rose control page"):
        Page.create(path, kv_total=1, device="d")
    assert path.read_bytes() == b"chapter one" * 500


def test_another_layout_is_an_error_that_names_both(page: Page) -> None:
    raw = page.path.read_bytes()
    page.path.write_bytes(raw[:8] + struct.pack("<I", LAYOUT + 41) + raw[12:])
    with pytest.raises(PageError, match=rf"{page.path} has layout {LAYOUT + 41}.*layout {LAYOUT}"):
        Page.open(page.path)


@pytest.mark.parametrize("length", [0, 8, 200, SIZE - 1])
def test_a_short_file_is_an_error(page: Page, length: int) -> None:
    os.truncate(page.path, length)
    with pytest.raises(PageError, match=f"{page.path} is truncated"):
        Page.open(page.path)


# ---- making a page


def test_create_takes_over_an_equal_page(page: Page) -> None:
    page.publish("serving", SERVING)
    again = Page.create(page.path, kv_total=1 << 30, device="cpu0")
    reading = again.serving()
    assert reading is not None
    assert reading.facts == SERVING
    again.publish("serving", msgspec.structs.replace(SERVING, tick=8))
    seen = page.serving()
    assert seen is not None
    assert seen.facts.tick == 8
    again.close()


@pytest.mark.parametrize(("kv_total", "device"), [(1 << 20, "cpu0"), (1 << 30, "cpu1")])
def test_create_renews_a_different_page_that_nobody_uses(
    page: Page, kv_total: int, device: str
) -> None:
    page._me = changed(page._me, started=page._me.started + 1)  # a process that is gone
    page.publish("serving", SERVING)
    other = Page.create(page.path, kv_total=kv_total, device=device)
    assert (other.kv_total, other.device) == (kv_total, device)
    assert other.serving() is None
    other.close()


def test_create_does_not_pull_the_page_from_under_a_live_engine(page: Page) -> None:
    page.publish("rollout", RolloutFacts(tick=1, kv_claim=5, kv_max=9))
    with pytest.raises(PageError, match=f"{page.path} .* process {os.getpid()}"):
        Page.create(page.path, kv_total=1 << 20, device="cpu0")
    assert page.rollout() is not None


def test_create_repairs_a_truncated_page_for_all_who_have_it_open(page: Page) -> None:
    page.publish("rollout", RolloutFacts(tick=1, kv_claim=5, kv_max=9))
    os.truncate(page.path, 0)
    page.publish("rollout", RolloutFacts(tick=2, kv_claim=5, kv_max=9))
    other = Page.create(page.path, kv_total=1 << 30, device="cpu0")
    reading = other.rollout()
    assert reading is not None
    assert reading.facts.tick == 2
    other.publish("serving", SERVING)
    assert page.serving() is not None
    other.close()


def test_a_page_is_for_its_owner_only(page: Page) -> None:
    assert page.path.stat().st_mode & 0o777 == 0o600


def _create_and_publish(path: Path, section: str, start: Event) -> None:
    start.wait(PATIENCE_S)
    page = Page.create(path, kv_total=1 << 30, device="cpu0")
    page.publish(section, SERVING if section == "serving" else RolloutFacts(tick=1, kv_max=9))


def test_two_engines_that_start_at_once_share_one_page(tmp_path: Path) -> None:
    for attempt in range(10):
        path, start = tmp_path / f"page{attempt}", fork.Event()
        engines = [
            fork.Process(target=_create_and_publish, args=(path, section, start))
            for section in ("serving", "rollout")
        ]
        for engine in engines:
            engine.start()
        start.set()
        for engine in engines:
            engine.join(PATIENCE_S)
        page = Page.open(path)
        assert page.serving() is not None
        assert page.rollout() is not None
        page.close()
