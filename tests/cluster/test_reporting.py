"""A node beside a scheduler that answers whatever it likes: the loop goes on, the term ends."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from rose.cluster import reporting
from rose.cluster.custody import TakenBack
from rose.cluster.reporting import _understood, report
from rose.executor.facts import RolloutFacts, ServingFacts
from rose.executor.page import Page
from rose.scheduler.lease import Order

LEASE_S = 60.0


class Over(BaseException):
    """The test has seen enough."""


class Time:
    """Stands still while nobody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.loops = 0
        monkeypatch.setattr(reporting, "asyncio", SimpleNamespace(sleep=self.sleep))

    async def sleep(self, seconds: float) -> None:
        assert 0.0 <= seconds <= reporting.REPORT_S
        self.now += seconds
        self.loops += 1


class Answer:
    def __init__(self, body: Any, status: int = 200) -> None:
        self.status = status
        self._body = body

    async def json(self) -> Any:
        return json.loads(self._body) if isinstance(self._body, bytes) else self._body

    async def text(self) -> str:
        return str(self._body)


class Node:
    """What reporting needs of one; its scheduler answers what a test wants."""

    def __init__(self, page: Page, time: Time, answers: Iterable[Any]) -> None:
        self.page = page
        self.clock = lambda: time.now
        self.config = SimpleNamespace(
            lease_s=LEASE_S, serving=object(), rollout=SimpleNamespace(max_seqs=8)
        )
        self.url = "http://node"
        self.ready = self.offered = True
        self.serving = self.rollout = SimpleNamespace(url="http://engine")
        self.session = SimpleNamespace(post=self._post)
        self.state = "active"
        self.orders: list[str] = []
        self.fails: Exception | None = None
        self.said: list[dict[str, Any]] = []
        self._answers = iter(answers)

    @contextlib.asynccontextmanager
    async def _post(self, url: str, **more: Any) -> Any:
        self.said.append(more["json"])
        assert url == "http://scheduler/rose/v1/nodes"
        answer = next(self._answers, Over())
        if isinstance(answer, BaseException):
            raise answer
        yield answer if isinstance(answer, Answer) else Answer(answer)

    def status(self) -> dict[str, Any]:
        return {"state": self.state}

    async def activate(self) -> float:
        return self._do("activate", "active")

    async def drain(self) -> float:
        return self._do("drain", "dormant")

    def _do(self, order: str, state: str) -> float:
        self.orders.append(order)
        if self.fails is not None:
            raise self.fails
        self.state = state
        return 0.0


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page.create(tmp_path / "page", kv_total=100, device="d")
    yield made
    made.close()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.fixture
def listen(page: Page, time: Time) -> Callable[..., Node]:
    def until_over(*answers: Any, **changes: Any) -> Node:
        node = Node(page, time, answers)
        for name, value in changes.items():
            setattr(node, name, value)
        with pytest.raises(Over):
            play(report(node, "http://scheduler/", "secret"))  # type: ignore[arg-type]
        return node

    return until_over


def play(scene: Coroutine[Any, Any, None]) -> None:
    """Without an event loop: nothing in here waits for anything real."""
    with contextlib.suppress(StopIteration):
        scene.send(None)


Listen = Callable[..., Node]
NONSENSE = [
    None,
    17,
    "activate",
    [],
    ["order"],
    {},
    {"order": "explode"},
    {"order": 17},
    {"order": ["activate"]},
    {"order": {"order": None}},
    b"not json",
    Answer({"order": "drain"}, status=500),
    Answer({"order": "drain"}, status=401),
    aiohttp.ClientConnectionError("refused"),
    TimeoutError(),
    OSError(24, "Too many open files"),
    RecursionError("a deep answer"),
    MemoryError(),
    KeyError("anything"),
    RuntimeError("Session is closed"),
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
def test_nonsense_ends_no_loop_and_no_term_before_its_time(
    time: Time, listen: Listen, nonsense: Any
) -> None:
    few = int(LEASE_S / reporting.REPORT_S)
    node = listen(*[nonsense] * few)
    assert node.orders == []
    assert len(node.said) == few + 1


@pytest.mark.parametrize("nonsense", NONSENSE, ids=repr)
def test_the_term_ends_when_nothing_understandable_came_for_so_long(
    time: Time, listen: Listen, nonsense: Any, caplog: pytest.LogCaptureFixture
) -> None:
    many = 2 * int(LEASE_S / reporting.REPORT_S)
    node = listen(*[nonsense] * many)
    assert node.orders == ["drain"]
    said = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 2  # the scheduler, once; and that the lease is over


def test_a_good_answer_begins_the_term_anew(time: Time, listen: Listen) -> None:
    almost = int(LEASE_S / reporting.REPORT_S) - 1
    answers = ([OSError()] * almost + [{"order": None}]) * 5
    assert listen(*answers).orders == []


@pytest.mark.parametrize("error", [TimeoutError("busy"), RuntimeError(), TakenBack("gone")])
def test_a_drain_that_fails_is_tried_again(
    time: Time, listen: Listen, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    node = listen(*[OSError()] * 40, fails=error)
    assert len(node.orders) > 3
    assert set(node.orders) == {"drain"}
    assert "draining failed" in caplog.text


def test_a_node_that_cannot_tell_its_state_goes_on(time: Time, listen: Listen) -> None:
    def status() -> dict[str, Any]:
        raise OSError(5, "Input/output error")

    many = 2 * int(LEASE_S / reporting.REPORT_S)
    listen(status=status, ready=_Ready(iter([True] * many)))
    assert time.loops == many


def test_a_node_that_is_not_ready_asks_nobody_and_its_term_runs_on(
    time: Time, listen: Listen
) -> None:
    long = int(LEASE_S / reporting.REPORT_S) + 1
    ready = [True] + [False] * long + [True] * 3
    node = listen({"order": None}, OSError(), OSError(), ready=_Ready(iter(ready)))
    assert len(node.said) == 1 + 3
    assert node.orders == ["drain"]


class _Ready:
    """Whether the node is ready, look after look; then the test is over."""

    def __init__(self, looks: Iterator[bool]) -> None:
        self._looks = looks

    def __bool__(self) -> bool:
        for look in self._looks:
            return look
        raise Over


# ---- orders


def test_orders_are_carried_out_at_once_and_reported(time: Time, listen: Listen) -> None:
    orders = [{"order": "activate"}, {"order": None}, {"order": "drain"}, {"order": None}]
    node = listen(*orders, state="dormant")
    assert node.orders == ["activate", "drain"]
    assert [word["active"] for word in node.said] == [False, True, True, False, False]
    assert time.loops == 2  # who has an order waits to hear that it is done


@pytest.mark.parametrize("order", list(Order))
def test_a_device_that_was_taken_back_obeys_no_scheduler(
    time: Time, listen: Listen, order: Order
) -> None:
    node = listen({"order": order}, {"order": order}, offered=False)
    assert node.orders == []
    assert node.said[0]["offered"] is False


def test_an_activation_that_fails_ends_no_loop(time: Time, listen: Listen) -> None:
    node = listen(*[{"order": "activate"}] * 3, state="dormant", fails=TimeoutError("not active"))
    assert node.orders == ["activate"] * 3


def test_what_is_reported(time: Time, listen: Listen, page: Page) -> None:
    page.publish("serving", ServingFacts(running=1, ttft_s=1.0, tpot_s=1.0))
    page.publish("rollout", RolloutFacts(kv_may=30, kv_max=120))
    word = listen({"order": None}).said[0]
    assert (word["load"], word["memory"], word["places"]) == (0.1, 0.25, 8)
    page.publish("rollout", RolloutFacts(kv_max=120))
    assert listen({"order": None}).said[0]["memory"] == 1.0


@pytest.mark.parametrize("answer", [{"order": None}, {"order": "drain", "more": 1}])
def test_what_is_understood(answer: dict[str, Any]) -> None:
    assert _understood(answer) == answer["order"]
