"""The engines' side: bring a host's copy of the weights to the newest version.

Of every step only the frames are fetched that hold something of the shards wanted here. An update
is taken whole or not at all: every frame is tried on a scratch copy and its checksum compared
before the first one is written.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import xxhash
from msgspec.structs import replace

from rose.transfer import frame, layout
from rose.transfer.copy import Copy, State, locked, read_state, write_state
from rose.transfer.delta import Changes, FrameError
from rose.transfer.errors import TransferError
from rose.transfer.fetch import Fetched, fetch
from rose.transfer.layout import Piece, Shard
from rose.transfer.manifest import Manifest, Step, Tensor, digest
from rose.transfer.route import route
from rose.transfer.store.base import Store

log = logging.getLogger("rose.transfer")


class Taken(NamedTuple):
    """What an update changed: frames of deltas, unless all was made anew (`base` is None)."""

    base: int | None
    frames: list[tuple[Piece, int, Changes]]
    version: int | None = None
    """What they lead to."""


class Early(Protocol):
    """Gets what one delta changes before the copy has it."""

    def frame(self, base: int, copy: Copy, piece: Piece, index: int, changes: Changes) -> None:
        """As it comes, not verified yet."""

    def whole(self, taken: Taken, copy: Copy) -> None:
        """All bytes are here and verified. If the copy does not bear it later, that is the copy's
        fault."""


class Subscriber:
    """Keeps the copy in `folder`; any number of them on a host share one.

    `shards`: what is wanted of the weights, everything when None. Who shares a folder wants the
    same. Whoever comes first updates the copy, the others wait and find it done.
    """

    def __init__(self, store: Store, folder: Path, shards: Sequence[Shard] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._store = store
        self._folder = folder
        self._shards = shards
        self._slices = "" if shards is None else _slices(shards)
        self._state: State | None = None
        self._copy: Copy | None = None
        self.taken = Taken(None, [])
        """By the last update, in this process."""
        with locked(folder / "updating", fcntl.LOCK_EX):
            self._look()

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

    def update(self, early: Early | None = None) -> int | None:
        """Take all steps to the newest version; returns it."""
        with locked(self._folder / "updating", fcntl.LOCK_EX):
            self._look()
            have = None if self._state is None else self._state.version
            self.taken = Taken(have, [])
            steps = route(self._store.steps(), have)
            for step in steps:
                try:
                    self._take(step, early if len(steps) == 1 else None)
                except TransferError as error:
                    if have is None or not self._is_whole(step):
                        raise
                    self._start_over(error)
                    break
            self.taken = self.taken._replace(version=self.version)
        return self.version

    def await_news(self) -> None:
        """A moment, or until there is a version to take."""
        version = self.version
        self._store.steps(-1 if version is None else version)

    @contextmanager
    def reading(self) -> Iterator[Copy]:
        """The copy at `version`; nobody changes it until the end."""
        with locked(self._folder / "reading", fcntl.LOCK_SH):
            self._look()
            yield self.copy

    def _look(self) -> None:
        """What others have made of the folder since."""
        state = read_state(self._folder)
        if state is not None:
            if state.job != self._store.job:
                raise TransferError(f"{self._folder} has weights of job {state.job}")
            if state.slices != self._slices:
                raise TransferError(f"{self._folder} has other slices of job {state.job}")
            path = self._folder / state.file
            if self._copy is None or self._copy.inode != path.stat().st_ino:
                self._copy = Copy(path, state.tensors)
        self._state = state

    def _take(self, step: Step, early: Early | None) -> None:
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
        fetched, staged = [], []
        for one in self._frames(manifests):
            changes = _changes(one, step)
            fetched.append(one)
            staged.append((one.piece, one.number, changes))
            if early is not None:
                early.frame(step.base, self._copy, one.piece, one.number, changes)
        if early is not None and _are_whole(fetched, manifests):
            early.whole(Taken(step.base, staged, step.version), self._copy)
        for one, (piece, index, changes) in zip(fetched, staged, strict=True):
            self._copy.patched(piece, index, changes, one.result)
        with locked(self._folder / "reading", fcntl.LOCK_EX):
            self._say(replace(self._state, changing=True))
            for piece, index, changes in staged:
                self._copy.apply(piece, index, changes)
            self._say(replace(self._state, version=step.version, changing=False))
        self.taken.frames.extend(staged)

    def _take_anchor(self, step: Step, manifests: list[Manifest], tensors: list[Tensor]) -> None:
        self.taken = Taken(None, [])
        name = f"weights-{step.version}"
        (self._folder / name).unlink(missing_ok=True)
        try:
            fresh = Copy(self._folder / name, tensors)
            fresh.reserve(self._shards)
        except OSError as error:
            raise TransferError(f"version {step.version}: {error}") from error
        for one in self._frames(manifests):
            elements = fresh.patched(one.piece, one.number, _changes(one, step), one.result)
            fresh.put(one.piece, one.number, elements)
        old, self._copy = self._copy, fresh
        self._say(State(self._store.job, step.version, tensors, name, self._slices))
        if old is not None and old.path != fresh.path:
            old.path.unlink(missing_ok=True)

    def _is_whole(self, step: Step) -> bool:
        """Whether a step's buckets are what its publisher wrote: if not, the copy is not to blame,
        and an anchor would be fetched in vain."""
        return all(
            digest(self._store.read(step, manifest.rank, number, 0, bucket.size)) == bucket.digest
            for manifest in self._store.manifests(step)
            for number, bucket in enumerate(manifest.buckets)
        )

    def _start_over(self, error: TransferError) -> None:
        """A step does not fit the copy: make another one from an anchor, and only then leave it."""
        self.taken = Taken(None, [])
        again = self._folder / "again"
        shutil.rmtree(again, ignore_errors=True)
        try:
            other = Subscriber(self._store, again, self._shards)
            other.update()
            assert other._state is not None
            log.warning("%s: made anew, as %s", self._folder, error)
            name = f"{other._state.file}-anew"
            (again / other._state.file).rename(self._folder / name)
            old = self._copy
            self._say(replace(other._state, file=name))
            self._look()
            if old is not None:
                old.path.unlink(missing_ok=True)
        except TransferError:
            raise error from None
        finally:
            shutil.rmtree(again, ignore_errors=True)

    def _frames(self, manifests: list[Manifest]) -> Iterator[Fetched]:
        for manifest in manifests:
            wanted = [
                (part, layout.wanted(manifest.piece(part), self._shards)) for part in manifest.parts
            ]
            yield from fetch(self._store, manifest, wanted)

    def _say(self, state: State) -> None:
        write_state(self._folder, state)
        self._state = state


def _are_whole(fetched: list[Fetched], manifests: list[Manifest]) -> bool:
    """Whether the frames are all bytes of all buckets, and those have their checksums."""
    buckets = [bucket for manifest in manifests for bucket in manifest.buckets]
    if sum(len(one.data) for one in fetched) != sum(bucket.size for bucket in buckets):
        return False
    frames = iter(fetched)
    for bucket in buckets:
        state, left = xxhash.xxh3_128(), bucket.size
        while left > 0 and (one := next(frames, None)) is not None:
            state.update(one.data)
            left -= len(one.data)
        if left or state.digest() != bucket.digest:
            return False
    return True


def newest_tensors(store: Store) -> list[Tensor]:
    """Of the newest version that a store has; empty when it has none."""
    steps = list(store.steps())
    return _tensors(store.manifests(steps[-1])) if steps else []


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


def _slices(shards: Sequence[Shard]) -> str:
    boxes = sorted({(shard.tensor, shard.box) for shard in shards})
    return digest(msgspec.msgpack.encode(boxes)).hex()
