"""Who waits for a version is told when it is there, and asks no more often than it must."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.transfer import Publisher
from rose.transfer.manifest import Step
from rose.transfer.relay import Relay
from rose.transfer.store import base, files
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Server
from rose.transfer.store.tcp import TcpStore

LONG_S = 60.0
"""A test that has to wait this long fails by its timeout."""


def publish(publisher: Publisher, version: int) -> None:
    publisher.publish({"w": torch.full((9,), float(version))}, version)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is answered but by news."""
    for module in (base, files):
        monkeypatch.setattr(module, "NEWS_S", LONG_S)
    monkeypatch.setattr("rose.transfer.relay.NEWS_S", LONG_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("way", ["file", "another process", "tcp", "relay"])
def test_news_come_at_once(tmp_path: Path, way: str) -> None:
    written = FileStore(tmp_path / "store", "job")
    publisher = Publisher(written)
    publish(publisher, 3)
    server = Server(lambda job: written)
    store: Any = {
        "file": lambda: written,
        "another process": lambda: FileStore(tmp_path / "store", "job"),
        "tcp": lambda: TcpStore(server.address, "job", patience_s=2 * LONG_S),
        "relay": lambda: Relay(
            TcpStore(server.address, "job", patience_s=2 * LONG_S), tmp_path / "relay"
        ),
    }[way]()
    assert Step(None, 3) in store.steps(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.steps, 3)
        publish(publisher, 4)
        assert Step(3, 4) in waiting.result()
    store.close()
    server.close()


def test_without_news_the_answer_is_what_there_is(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "job")
    assert store.steps(-1) == {}
    publish(Publisher(store), 3)
    assert store.steps(3) == store.steps() != {}


class Counting:
    """A store that counts who waits."""

    def __init__(self, store: FileStore) -> None:
        self.job = store.job
        self.asked = 0
        self.opened = threading.Event()
        self._store = store

    def steps(self, after: int | None = None) -> dict[Step, int]:
        if after is not None:
            self.asked += 1
            self.opened.wait()
        return self._store.steps()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.usefixtures("patient")
def test_a_relay_asks_once_for_all_who_wait(tmp_path: Path) -> None:
    written = FileStore(tmp_path / "store", "job")
    publisher = Publisher(written)
    publish(publisher, 0)
    upstream = Counting(written)
    relay = Relay(upstream, tmp_path / "relay")
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(relay.steps, 0) for _ in range(8)]
        publish(publisher, 1)
        upstream.opened.set()
        assert all(Step(0, 1) in one.result() for one in waiting)
    assert upstream.asked == 1


@pytest.mark.parametrize("follows", [True, False])
def test_a_relay_fetches_what_nobody_asked_for_only_if_it_follows(
    tmp_path: Path, follows: bool
) -> None:
    written = FileStore(tmp_path / "store", "job")
    publish(Publisher(written), 0)
    asked, real = threading.Event(), Relay._bring_newest

    class Watched(Relay):
        def _bring_newest(self, known: dict[Step, int]) -> None:
            real(self, known)
            asked.set()

    relay = Watched(written, tmp_path / "relay", follows=follows)
    assert set(relay.steps()) == set(relay.steps(-1)) == {Step(None, 0)}
    if follows:
        assert asked.wait(LONG_S)
        while not FileStore(tmp_path / "relay", "job").steps():
            pass
    assert asked.is_set() is follows
    assert relay.manifests(Step(None, 0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("after", [None, 0])
def test_a_relay_asks_again_after_a_defect(
    tmp_path: Path, after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = FileStore(tmp_path / "store", "job")
    publish(Publisher(written), 1)
    relay = Relay(written, tmp_path / "relay")
    with monkeypatch.context() as broken:
        broken.setattr(written, "steps", lambda after: 1 / 0)
        assert relay.steps(after) == {}
    while not relay.steps(after):
        pass
