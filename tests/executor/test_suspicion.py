"""When a rollout engine is killed for being in serving's way, and by whom."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.executor.neighbours import Blocks, Table

from rose.executor import lender
from rose.executor.facts import LeaseState, NodeOrders, RolloutFacts, ServingFacts
from rose.executor.lender import Lender
from rose.executor.page import SECTION, Page
from rose.executor.processes import Writer, process_start
from rose.executor.suspicion import DISOBEYED_S, PRESSURE_S, STOPPED_S, UNSEEN_S, Suspicion

TOTAL = 100
NOW = 1000.0
PATIENCES = (1.0, lender.PATIENCE)
SERVING, ROLLOUT, NODE = Writer(11, 1), Writer(12, 1), Writer(13, 1)


class Scene:
    """A page on which all three are well, at a time that a test moves on."""

    def __init__(self, path: Path) -> None:
        self.processes = Table()
        self._pages = {
            section: Page.create(
                path, kv_total=TOTAL, device="d", me=writer, processes=self.processes
            )
            for section, writer in (("serving", SERVING), ("rollout", ROLLOUT), ("node", NODE))
        }
        self.page = self._pages["serving"]
        self.claim, self.need, self.now = 50, 40, NOW
        self.state, self.offered = LeaseState.ACTIVE, 1
        self.seen = True

    def tell(self) -> None:
        if self.seen:
            facts = ServingFacts(
                written=self.now, ttft_s=1.0, tpot_s=0.1, kv_need=self.need, kv_max=TOTAL
            )
            self._pages["serving"].publish("serving", facts)
        facts = RolloutFacts(kv_claim=self.claim, kv_max=TOTAL, state=LeaseState.ACTIVE)
        self._pages["rollout"].publish("rollout", facts)
        self._pages["node"].publish("node", NodeOrders(state=self.state, offered=self.offered))

    def looks(self, look: Callable[[float], str | None], seconds: float) -> list[str]:
        """What is said over that time, at ten looks a second."""
        said = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.tell()
            if why := look(self.now):
                said.append(why)
        return said


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "page")


def freeze(scene: Scene) -> None:
    scene.processes.frozen.add(ROLLOUT)


def press(scene: Scene) -> None:
    scene.need = 51


def order_off(scene: Scene) -> None:
    scene.state = LeaseState.DORMANT


def take_back(scene: Scene) -> None:
    scene.offered = 0


def hide_serving(scene: Scene) -> None:
    scene.seen = False


def wakes(scene: Scene) -> None:
    scene.processes.frozen.clear()
    scene.need, scene.seen, scene.offered = 40, True, 1
    scene.state = LeaseState.ACTIVE


WRONGS = [
    (freeze, STOPPED_S, "stopped"),
    (press, PRESSURE_S, "memory that serving needs"),
    (order_off, DISOBEYED_S, "revocation"),
    (take_back, DISOBEYED_S, "revocation"),
    (hide_serving, 0.5 + UNSEEN_S, "unseen"),
]
wrongs = pytest.mark.parametrize(("wrong", "limit_s", "why"), WRONGS)
patiences = pytest.mark.parametrize("patience", PATIENCES)
Wrong = Callable[[Scene], None]


@patiences
def test_an_engine_in_nobodys_way_is_never_suspected(scene: Scene, patience: float) -> None:
    suspicion = Suspicion(patience)
    assert scene.looks(lambda now: suspicion.stuck(scene.page, now), 20.0) == []


@wrongs
@patiences
def test_what_lasts_is_told_and_not_before(
    scene: Scene, wrong: Wrong, limit_s: float, why: str, patience: float
) -> None:
    suspicion = Suspicion(patience)

    def look(now: float) -> str | None:
        return suspicion.stuck(scene.page, now)

    scene.looks(look, 1.0)
    wrong(scene)
    assert scene.looks(look, limit_s * patience - 0.3) == []
    said = scene.looks(look, 1.0)
    assert said
    assert all(why in what for what in said)


@wrongs
def test_what_ends_in_time_begins_anew(
    scene: Scene, wrong: Wrong, limit_s: float, why: str
) -> None:
    suspicion = Suspicion()

    def look(now: float) -> str | None:
        return suspicion.stuck(scene.page, now)

    scene.looks(look, 1.0)
    for _ in range(5):
        wrong(scene)
        assert scene.looks(look, limit_s - 0.3) == []
        wakes(scene)
        assert scene.looks(look, 0.2) == []


@wrongs
def test_the_node_is_first_and_serving_does_it_where_there_is_none(
    scene: Scene, wrong: Wrong, limit_s: float, why: str
) -> None:
    blocks = Blocks(TOTAL, usable=TOTAL)
    serving = Lender(scene.page, blocks, 0.2, threading.Lock(), slice_bytes=TOTAL, owns=True)
    node, told = Suspicion(), []
    when: dict[str, float] = {}

    def look(now: float) -> str | None:
        serving.defend(now, told.append)
        if scene.processes.killed:
            when.setdefault("serving", now)
        if node.stuck(scene.page, now):
            when.setdefault("node", now)
        return None

    wrong(scene)
    scene.looks(look, (limit_s + 0.5) * lender.PATIENCE)
    assert when["node"] < when["serving"]
    assert set(scene.processes.killed) == {ROLLOUT}
    assert serving.killed == len(told) == len(scene.processes.killed)
    assert why in told[0]


def test_after_a_kill_it_waits_before_the_next_one(scene: Scene) -> None:
    blocks = Blocks(TOTAL, usable=TOTAL)
    serving = Lender(scene.page, blocks, 0.2, threading.Lock(), slice_bytes=TOTAL, owns=True)
    freeze(scene)
    scene.looks(lambda now: serving.defend(now, lambda _: None), 1.8 * 3)
    assert 2 <= serving.killed <= 3


def test_an_engine_that_holds_nothing_is_left_alone_unless_it_is_stopped(scene: Scene) -> None:
    suspicion = Suspicion()
    scene.claim, scene.offered, scene.seen, scene.need = 0, 0, False, TOTAL
    assert scene.looks(lambda now: suspicion.stuck(scene.page, now), 10.0) == []
    freeze(scene)
    assert scene.looks(lambda now: suspicion.stuck(scene.page, now), 2.0)


def test_a_dead_engine_is_not_suspected(scene: Scene) -> None:
    suspicion = Suspicion()
    freeze(scene)
    scene.processes.dead.add(ROLLOUT)
    assert scene.looks(lambda now: suspicion.stuck(scene.page, now), 10.0) == []


def test_a_device_without_serving_is_not_unseen(scene: Scene) -> None:
    suspicion = Suspicion()
    scene.seen = False

    def look(now: float) -> str | None:
        return suspicion.stuck(scene.page, now, dedicated=True)

    assert scene.looks(look, 10.0) == []


@pytest.mark.parametrize(("wrong", "limit_s", "why"), [w for w in WRONGS if w[0] is not press])
def test_a_half_that_a_stopped_engine_left_torn_hides_nobody(
    scene: Scene, wrong: Wrong, limit_s: float, why: str
) -> None:
    """Who is stopped while it writes leaves its half unreadable for ever."""
    blocks = Blocks(TOTAL, usable=TOTAL)
    serving = Lender(scene.page, blocks, 0.2, threading.Lock(), slice_bytes=TOTAL, owns=True)

    def look(now: float) -> None:
        os.pwrite(scene.page._fd, struct.pack("<I", 3), SECTION["rollout"])
        assert scene.page.rollout() is None
        serving.defend(now, lambda _: None)

    scene.looks(look, 10.0)
    assert serving.killed == 0
    wrong(scene)
    scene.looks(look, (limit_s + 0.5) * lender.PATIENCE)
    assert set(scene.processes.killed) == {ROLLOUT}


def test_a_stopped_engine_that_the_page_names_no_more_is_killed(scene: Scene) -> None:
    """With the node dead, nobody else writes a page again that was cut off."""
    blocks = Blocks(TOTAL, usable=TOTAL)
    serving = Lender(scene.page, blocks, 0.2, threading.Lock(), slice_bytes=TOTAL, owns=True)
    scene.looks(lambda now: serving.defend(now, lambda _: None), 1.0)
    freeze(scene)
    os.truncate(scene.page.path, 0)
    assert scene.page.rollout_writer() is None
    for look in range(30):
        serving.defend(scene.now + look / 10, lambda _: None)
    assert set(scene.processes.killed) == {ROLLOUT}


# ---- with real processes


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_a_stopped_process_that_holds_memory_is_killed(
    page: Page, sleeper: subprocess.Popen[bytes]
) -> None:
    theirs = Writer(sleeper.pid, process_start(sleeper.pid) or 0)
    rollout = Page.open(page.path, me=theirs)
    rollout.publish("rollout", RolloutFacts(kv_claim=1, kv_max=9))
    blocks = Blocks(TOTAL, usable=TOTAL)
    serving = Lender(page, blocks, 0.2, threading.Lock(), slice_bytes=1, owns=True)

    def looks(began: float) -> None:
        for look in range(30):
            now = began + look / 10
            page.publish("serving", ServingFacts(written=now, ttft_s=1.0, tpot_s=1.0))
            serving.defend(now, lambda _: None)

    looks(NOW)
    assert serving.killed == 0
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    looks(NOW + 10.0)
    assert serving.killed == 1
    assert sleeper.wait(60) == -signal.SIGKILL
    looks(NOW + 20.0)
    assert serving.killed == 1
    rollout.close()
