"""The engines' side: bring a host's copy of the weights to the newest version.

Of every step only the frames are fetched that hold something of the shards wanted here. An update
is taken whole or not at all: every frame is tried on a scratch copy and its checksum compared
before the first one is written.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from rose.transfer import frame, layout
from rose.transfer.copy import Copy, State, TransferError, read_state, write_state
from rose.transfer.delta import Changes, FrameError
from rose.transfer.fetch import Fetched, fetch
from rose.transfer.layout import Shard
from rose.transfer.manifest import Manifest, Step, Tensor
from rose.transfer.route import route
from rose.transfer.store.base import Store


class Subscriber:
    """One per host copy: `folder` belongs to it. `shards`: what is wanted; everything when None."""

    def __init__(self, store: Store, folder: Path, shards: Sequence[Shard] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._store = store
        self._folder = folder
        self._shards = shards
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TransferError(f"{folder} already has a subscriber") from error
        self._state = read_state(folder)
        self._copy: Copy | None = None
        if self._state is not None:
            if self._state.job != store.job:
                raise TransferError(f"{folder} has weights of job {self._state.job}")
            self._copy = Copy(folder / self._state.file, self._state.tensors)

    @property
    def version(self) -> int | None:
        """What the copy is, whole; None when there is none, or it is between two versions."""
        state = self._state
        return None if state is None or state.changing else state.version

    @property
    def copy(self) -> Copy:
        if self._copy is None or self.version is None:
            raise TransferError(f"{self._folder} has no whole version yet")
        return self._copy

    def update(self) -> int | None:
        """Take all steps to the newest version; returns it."""
        have = None if self._state is None else self._state.version
        for step in route(self._store.steps(), have):
            self._take(step)
        return self.version

    def close(self) -> None:
        self._lock.close()

    def _take(self, step: Step) -> None:
        manifests = self._store.manifests(step)
        tensors = _tensors(manifests)
        if step.base is None:
            self._take_anchor(step, manifests, tensors)
            return
        assert self._copy is not None and self._state is not None
        for tensor in tensors:
            if self._copy.tensors.get(tensor.name) != tensor:
                raise TransferError(
                    f"version {step.version} has {tensor.name} as {tensor.dtype} of "
                    f"{tensor.shape}, which version {step.base} has not"
                )
        staged = []
        for one in self._frames(manifests):
            changes = _changes(one, step)
            self._copy.patched(one.piece, one.number, changes, one.result)
            staged.append((one.piece, one.number, changes, one.result))
        self._say(replace(self._state, changing=True))
        for piece, index, changes, result in staged:
            self._copy.put(piece, index, self._copy.patched(piece, index, changes, result))
        self._say(replace(self._state, version=step.version, changing=False))

    def _take_anchor(self, step: Step, manifests: list[Manifest], tensors: list[Tensor]) -> None:
        name = f"weights-{step.version}"
        (self._folder / name).unlink(missing_ok=True)
        fresh = Copy(self._folder / name, tensors)
        for one in self._frames(manifests):
            elements = fresh.patched(one.piece, one.number, _changes(one, step), one.result)
            fresh.put(one.piece, one.number, elements)
        old, self._copy = self._copy, fresh
        self._say(State(self._store.job, step.version, tensors, name))
        if old is not None and old.path != fresh.path:
            old.path.unlink(missing_ok=True)

    def _frames(self, manifests: list[Manifest]) -> Iterator[Fetched]:
        for manifest in manifests:
            wanted = [
                (part, layout.wanted(manifest.piece(part), self._shards)) for part in manifest.parts
            ]
            yield from fetch(self._store, manifest, wanted)

    def _say(self, state: State) -> None:
        write_state(self._folder, state)
        self._state = state


def _changes(one: Fetched, step: Step) -> Changes:
    try:
        return frame.unpack(one.data)
    except FrameError as error:
        raise TransferError(
            f"version {step.version}: {one.piece.tensor}, frame {one.number}: {error}"
        ) from error


def _tensors(manifests: list[Manifest]) -> list[Tensor]:
    """Of all ranks; they must agree on what they share."""
    found: dict[str, Tensor] = {}
    for manifest in manifests:
        for tensor in manifest.tensors:
            if found.setdefault(tensor.name, tensor) != tensor:
                raise TransferError(f"version {manifest.version}: ranks differ on {tensor.name}")
    return list(found.values())
