"""What a worker does between versions: stage, hold, write; without vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.transfer.copy import Copy
from rose.transfer.delta import Changes
from rose.transfer.errors import TransferError
from rose.transfer.layout import Piece
from rose.transfer.publisher import Publisher
from rose.transfer.store.base import StoreError
from rose.transfer.store.files import FileStore
from rose.transfer.subscriber import Subscriber
from rose.transfer.vllm.follower import Follower
from rose.transfer.vllm.staging import Frames, Staged

WAIT_S = 30.0


class Worker:
    """A model of one number, and a follower that keeps it up to date."""

    def __init__(self, folder: Path) -> None:
        self.store = FileStore(folder / "store", "job")
        self.publisher = Publisher(self.store, threads=1)
        self.folder = folder
        self.model = -1.0
        self.compared: list[bool] = []
        """For every staging, whether it had to compare with the model."""
        self.expected: list[Changes] = []
        self.early = False
        """It can stage what the copy has not yet."""
        self.broken = ""
        self.breaks: type[Exception] = StoreError
        self.follower = Follower(self.open)

    def open(self) -> Any:
        if not self.store.steps():
            return None
        return Subscriber(self.store, self.folder / "copy"), self

    def expect(self, copy: Copy, piece: Piece, index: int, changes: Changes) -> None:
        self.expected.append(changes)

    def stage(
        self, copy: Copy, version: int, taken: Frames | None, early: bool = False
    ) -> Staged | None:
        if self.broken:
            raise self.breaks(self.broken)
        if early:
            return self.stage_early(version, taken) if self.early else None
        self.compared.append(taken is None)
        value = torch.from_numpy(copy.arrays["w"].view("i2")).view(torch.bfloat16)[0].item()

        return self.staged(version, value)

    def stage_early(self, version: int, taken: Frames | None) -> Staged:
        assert taken is not None
        ((_, _, changes),) = taken
        assert self.expected[-1] is changes
        values = torch.from_numpy(changes.values.view("i2")).view(torch.bfloat16)
        return self.staged(version, values[0].item())

    def staged(self, version: int, value: float) -> Staged:
        def write() -> None:
            self.model = value

        return Staged(version, 1, [write])

    def publish(self, value: float) -> None:
        self.publisher.publish({"w": torch.full((4,), value)})

    def until_staged(self, version: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.follower.status(version)["staged"] != version:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def update(self, version: int) -> None:
        self.follower.arm(version, WAIT_S)
        self.follower.commit()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    made.follower.stop()


def test_a_version_goes_in_when_it_is_armed_and_committed(worker: Worker) -> None:
    worker.publish(1.0)
    worker.until_staged(0)
    assert (worker.model, worker.follower.version) == (-1.0, None)
    worker.follower.arm(0, WAIT_S)
    assert worker.model == -1.0
    worker.follower.commit()
    assert (worker.model, worker.follower.version) == (1.0, 0)
    worker.update(0)
    assert worker.model == 1.0


def test_only_a_model_of_unknown_weights_is_compared(worker: Worker) -> None:
    worker.publish(1.0)
    worker.update(0)
    worker.publish(2.0)
    worker.update(1)
    worker.publish(3.0)
    worker.until_staged(2)
    worker.publish(4.0)
    worker.until_staged(3)
    worker.update(3)
    assert worker.model == 4.0
    assert worker.compared == [True, False, False, True]


def test_a_known_change_is_staged_before_the_copy_has_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.publish(1.0)
    worker.update(0)
    worker.early = True
    go_on = threading.Event()
    apply = Copy.apply

    def wait(*args: Any) -> None:
        assert go_on.wait(WAIT_S)
        apply(*args)

    monkeypatch.setattr(Copy, "apply", wait)
    worker.publish(2.0)
    worker.update(1)
    assert (worker.model, worker.follower.version) == (2.0, 1)
    go_on.set()
    worker.early = False
    worker.publish(3.0)
    worker.update(2)
    assert worker.model == 3.0
    assert worker.compared == [True, False]


def test_what_was_staged_before_a_commit_is_staged_again(worker: Worker) -> None:
    worker.publish(1.0)
    worker.follower.arm(0, WAIT_S)
    worker.publish(2.0)
    worker.until_staged(1)
    worker.follower.commit()
    assert worker.model == 1.0
    worker.update(1)
    assert worker.model == 2.0
    assert worker.compared == [True, True, True]


def test_a_version_that_does_not_come_is_said(worker: Worker) -> None:
    with pytest.raises(TransferError, match="version 5 cannot be committed: it did not come"):
        worker.follower.arm(5, 0.1)
    worker.publish(1.0)
    worker.publish(2.0)
    worker.until_staged(1)
    with pytest.raises(TransferError, match="version 0 cannot be committed: 1 is staged"):
        worker.follower.arm(0, 0.1)
    with pytest.raises(TransferError, match="no version is armed"):
        worker.follower.commit()
    assert worker.model == -1.0


def test_a_given_up_update_changes_nothing(worker: Worker) -> None:
    worker.publish(1.0)
    worker.follower.arm(0, WAIT_S)
    worker.follower.disarm()
    with pytest.raises(TransferError, match="no version is armed"):
        worker.follower.commit()
    worker.update(0)
    assert worker.model == 1.0


@pytest.mark.parametrize("kind", [StoreError, OSError, RuntimeError, MemoryError])
def test_errors_are_told_and_end(worker: Worker, kind: type[Exception]) -> None:
    worker.breaks = kind
    worker.broken = "the cable is cut"
    worker.publish(1.0)
    deadline = time.monotonic() + WAIT_S
    while "the cable is cut" not in worker.follower.status(0)["error"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(TransferError, match="the cable is cut"):
        worker.follower.arm(0, 0.1)
    worker.broken = ""
    worker.update(0)
    assert (worker.model, worker.follower.status()["error"]) == (1.0, "")


def test_a_write_that_fails_leaves_no_version_and_is_done_again(worker: Worker) -> None:
    worker.publish(1.0)
    worker.update(0)
    worker.publish(2.0)
    worker.until_staged(1)

    def fail() -> None:
        raise RuntimeError("out of memory")

    worker.follower.arm(1, WAIT_S)
    assert worker.follower._armed is not None
    worker.follower._armed.writes.insert(0, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.follower.commit()
    assert worker.follower.status()["version"] is None
    worker.update(1)
    assert worker.model == 2.0
    assert worker.compared[-1]


def test_nothing_is_left_when_it_stops(worker: Worker) -> None:
    worker.follower.stop()
    assert not [t for t in threading.enumerate() if t.name == "rose-weights"]
