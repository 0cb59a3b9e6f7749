"""The node's HTTP API without engines: who may call it, and what it says when orders fail."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rose.cluster.api import application
from rose.cluster.custody import Overtaken, TakenBack
from rose.executor.facts import RolloutFacts, ServingFacts
from rose.executor.page import SECTION, Page

ROUTES = [
    ("GET", "/health"),
    ("GET", "/status"),
    ("GET", "/page"),
    ("GET", "/metrics"),
    ("POST", "/activate"),
    ("POST", "/drain"),
    ("POST", "/revoke"),
]


class FakeNode:
    """A node without engines: what the API needs of one."""

    def __init__(self, page: Page, secret: str | None) -> None:
        self.config = SimpleNamespace(secret=secret)
        self.page = page
        self.ready = self.offered = True
        self.kills = 3
        self.serving = self.rollout = self.session = None
        self.restarts = {"serving": 0, "rollout": 2}
        self.last_activate_s = self.last_revoke_s = 0.25
        self.orders: list[str] = []

    def status(self) -> dict[str, Any]:
        return {"state": "dormant"}

    async def lend(self) -> float:
        raise TimeoutError("the rollout engine is not active after 10 s")

    async def drain(self) -> float:
        self.orders.append("drain")
        return 0.1

    async def take_back(self) -> float:
        self.orders.append("take back")
        return 0.1


@pytest.fixture
def fake(tmp_path: Path) -> FakeNode:
    page = Page.create(tmp_path / "page", kv_total=1 << 20, device="cpu:0")
    page.publish("serving", ServingFacts(ttft_s=0.5, tpot_s=0.1, kv_max=1 << 20, kv_quota=1 << 19))
    page.publish("rollout", RolloutFacts(granted=7, refused_busy=3, kv_max=1 << 20))
    return FakeNode(page, None)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_secret_guards_every_route(fake: FakeNode, method: str, path: str) -> None:
    fake.config.secret = "open sesame"
    client = TestClient(application(fake))  # type: ignore[arg-type]
    for wrong in ({}, {"Authorization": "Bearer open"}, {"Authorization": "Bearer "}):
        assert client.request(method, path, headers=wrong).status_code == 401
    assert not fake.orders
    right = {"Authorization": "Bearer open sesame"}
    assert client.request(method, path, headers=right).status_code in (200, 504)


def test_orders_answer_with_their_time_or_say_what_failed(fake: FakeNode) -> None:
    client = TestClient(application(fake))  # type: ignore[arg-type]
    done = client.post("/revoke")
    assert (done.status_code, done.json()) == (200, {"seconds": 0.1, "state": "dormant"})
    failed = client.post("/activate")
    assert failed.status_code == 504
    assert "not active" in failed.json()["error"]
    assert client.get("/activate").status_code == 405
    assert fake.orders == ["take back"]


@pytest.mark.parametrize("kind", [TakenBack, Overtaken])
def test_what_another_order_forbids_is_a_conflict(
    fake: FakeNode, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    async def drain() -> float:
        raise kind("the device was taken back")

    monkeypatch.setattr(fake, "drain", drain)
    refused = TestClient(application(fake)).post("/drain")  # type: ignore[arg-type]
    assert (refused.status_code, refused.json()["error"]) == (409, "the device was taken back")


def test_the_page_can_be_read_over_http(fake: FakeNode) -> None:
    answer = TestClient(application(fake)).get("/page")  # type: ignore[arg-type]
    assert answer.text.count("NaN") == answer.text.count("Infinity") == 0, "not JSON"
    assert answer.json()["rollout"]["granted"] == 7


def test_metrics_say_that_serving_cannot_be_seen_when_its_half_cannot_be_read(
    fake: FakeNode,
) -> None:
    """An alert on 0 never fires while there is no value."""
    os.truncate(fake.page.path, SECTION["serving"])
    text = TestClient(application(fake)).get("/metrics").text  # type: ignore[arg-type]
    assert "rose_serving_seen 0.0" in text.splitlines()
    assert "rose_serving_alive" not in text


def test_metrics_say_what_is_on_the_page(fake: FakeNode) -> None:
    text = TestClient(application(fake)).get("/metrics").text  # type: ignore[arg-type]
    for line in (
        "rose_grants_total 7.0",
        'rose_refusals_total{reason="busy"} 3.0',
        'rose_kv_quota_bytes{engine="serving"} 524288.0',
        'rose_engine_restarts_total{engine="rollout"} 2.0',
        'rose_lease_state{state="dormant"} 1.0',
        "rose_rollout_killed_total 3.0",
        "rose_offered 1.0",
        "rose_serving_seen 0.0",
    ):
        assert line in text.splitlines()
