"""One copy of the weights for all engines of a host."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.transfer.test_history import SHAPES, World, got, wire

from rose.transfer.errors import TransferError
from rose.transfer.layout import Shard, part
from rose.transfer.subscriber import Subscriber


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, 7)


def test_engines_of_a_host_share_one_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    real = world.store.read

    def counted(*args: Any) -> bytes:
        nonlocal reads
        reads += 1
        return real(*args)

    monkeypatch.setattr(world.store, "read", counted)
    world.publish()
    world.publish()
    first, second = (Subscriber(world.store, world.folder / "shared") for _ in range(2))
    first.update()
    once = reads
    assert once > 0
    assert second.update() == 1
    assert reads == once
    assert first.copy.inode == second.copy.inode
    world.publish()
    second.update()
    with first.reading() as copy:
        assert first.version == 2
        assert {name: array.tobytes() for name, array in copy.arrays.items()} == wire(world.values)


def test_a_copy_is_not_patched_while_somebody_reads_it(world: World) -> None:
    world.publish()
    reader, writer = (Subscriber(world.store, world.folder / "shared") for _ in range(2))
    reader.update()
    before = wire(world.values)
    world.values["embed"] += 1.0
    world.publisher.publish(world.values)
    writing = threading.Thread(target=writer.update)
    with reader.reading() as copy:
        writing.start()
        writing.join(timeout=0.5)
        assert writing.is_alive()
        assert {name: array.tobytes() for name, array in copy.arrays.items()} == before
    writing.join(timeout=20.0)
    assert not writing.is_alive()
    with reader.reading():
        assert got(reader) == wire(world.values)


def test_who_wants_other_slices_needs_another_folder(world: World) -> None:
    world.publish()
    Subscriber(world.store, world.folder / "shared").update()
    half = [Shard("embed", part(SHAPES["embed"], 0, 0, 2), "embed")]
    with pytest.raises(TransferError, match="has other slices of job job"):
        Subscriber(world.store, world.folder / "shared", half)


def test_a_copy_that_does_not_fit_on_the_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransferError, match=r"version 0: .*No space left"):
        world.host(0).update()
    monkeypatch.undo()
    world.update(0)
