"""Facts about published weights: what a store has, and whether it is whole.

`Verification` reads every bucket once. One copy of the weights goes from version to version: the
steps that start from where it is are tried on it, then the shortest good one is applied. An anchor
begins a new copy, and must be what the steps before it lead to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rose.transfer import frame
from rose.transfer.copy import Copy
from rose.transfer.delta import UNSIGNED, Changes, FrameError, check
from rose.transfer.errors import TransferError
from rose.transfer.fetch import fetch
from rose.transfer.layout import FRAME, Piece, Shape, size
from rose.transfer.manifest import DIGEST, WIDTHS, Manifest, Part, Step, Tensor, digest
from rose.transfer.store.base import Store, StoreError

Read = Callable[[int], None]
"""Is told how much was done since it was told last."""


@dataclass(frozen=True)
class StepFacts:
    version: int
    base: int | None
    bytes: int
    changed: int
    elements: int
    density: float
    ranks: int


@dataclass(frozen=True)
class TensorFacts:
    name: str
    dtype: str
    """On the wire."""
    shape: Shape
    elements: int
    changed: int
    density: float
    bytes: int
    """Of its frames."""

    @classmethod
    def of(cls, tensor: Tensor, changed: int, sent: int) -> TensorFacts:
        count = tensor.elements
        return cls(tensor.name, tensor.dtype, tensor.shape, count, changed, changed / count, sent)


def survey(store: Store) -> list[StepFacts]:
    """All steps of a store, in its order."""
    found = []
    for step, stored in store.steps().items():
        manifests = store.manifests(step)
        changed = sum(manifest.changed for manifest in manifests)
        elements = sum(manifest.elements for manifest in manifests)
        density = changed / max(1, elements)
        found.append(
            StepFacts(step.version, step.base, stored, changed, elements, density, len(manifests))
        )
    return found


def contents(store: Store, step: Step, read: Read) -> list[TensorFacts]:
    """All tensors of a step, by name."""
    tensors: dict[str, Tensor] = {}
    changed: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for manifest in store.manifests(step):
        tensors |= {tensor.name: tensor for tensor in manifest.tensors}
        everything = [(part, range(manifest.piece(part).frames)) for part in manifest.parts]
        for one in fetch(store, manifest, everything):
            name = one.piece.tensor
            try:
                changed[name] += frame.unpack(one.data).changed
            except FrameError as error:
                place = f"{named(step)}, rank {manifest.rank}, {name}, frame {one.number}"
                raise TransferError(f"{place}: {error}") from error
            sent[name] += len(one.data)
            read(len(one.data))
    return [TensorFacts.of(tensors[name], changed[name], sent[name]) for name in sorted(tensors)]


# ---- is it whole?


class _Frame(NamedTuple):
    rank: int
    tensor: Tensor
    piece: Piece
    number: int
    changes: Changes
    result: bytes


class Verification:
    """Of the `steps` of a store; `folder` needs room for two copies of the weights."""

    def __init__(self, store: Store, steps: Mapping[Step, int], folder: Path, read: Read) -> None:
        self._store = store
        self._steps = steps
        self._folder = folder
        self._read = read
        self._copy: Copy | None = None
        self._at: int | None = None
        self.alone = 0
        """Steps that could not be applied, as their base is not there; all else was checked."""

    def damage(self) -> Iterator[str]:
        """Everything that is wrong, a line each."""
        versions = {number for step in self._steps for number in step if number is not None}
        for version in sorted(versions):
            anchor = Step(None, version)
            if anchor in self._steps:
                yield from self._anchor(anchor)
            yield from self._deltas(version)

    def _anchor(self, step: Step) -> Iterator[str]:
        wrong: list[str] = []
        manifests = self._manifests(step, wrong)
        tensors = {tensor.name: tensor for one in manifests for tensor in one.tensors}
        try:
            fresh = Copy(self._folder / f"weights-{step.version}", list(tensors.values()))
            fresh.reserve(None)
        except OSError as error:
            raise TransferError(f"{named(step)} has no room in {self._folder}: {error}") from error
        for one in self._frames(manifests, wrong):
            try:
                fresh.put(one.piece, one.number, _tried(one, fresh))
            except TransferError as error:
                wrong.append(f"{named(step)}, rank {one.rank}, {error}")
        if not wrong and self._copy is not None and self._at == step.version:
            wrong += [
                f"{named(step)}, {name}: not what the steps before lead to"
                for name in fresh.tensors | self._copy.tensors
                if not _same(name, fresh, self._copy)
            ]
        if wrong:
            fresh.path.unlink()
        else:
            if self._copy is not None:
                self._copy.path.unlink()
            self._copy, self._at = fresh, step.version
        yield from self._still_there(step, wrong)

    def _deltas(self, version: int) -> Iterator[str]:
        """Those from this version, the longest first: the shortest good one is applied."""
        copy = self._copy if self._at == version else None
        leading: list[_Frame] = []
        for step in sorted((one for one in self._steps if one.base == version), reverse=True):
            wrong: list[str] = []
            good = []
            for one in self._frames(self._manifests(step, wrong), wrong):
                try:
                    if copy is None:
                        _check(one)
                    else:
                        _tried(one, copy)
                        good.append(one)
                except TransferError as error:
                    wrong.append(f"{named(step)}, rank {one.rank}, {error}")
            if copy is None:
                self.alone += 1
            elif not wrong:
                leading, self._at = good, step.version
            yield from self._still_there(step, wrong)
        for one in leading:
            assert copy is not None
            copy.apply(one.piece, one.number, one.changes)

    def _manifests(self, step: Step, wrong: list[str]) -> list[Manifest]:
        try:
            return self._store.manifests(step)
        except StoreError as error:
            wrong.append(f"{named(step)}: {error}")
            return []

    def _frames(self, manifests: list[Manifest], wrong: list[str]) -> Iterator[_Frame]:
        """Those that can be unpacked, from buckets that are checked on the way."""
        for manifest in manifests:
            place = f"{named(manifest.step)}, rank {manifest.rank}"
            for number, bucket in enumerate(manifest.buckets):
                try:
                    data = self._store.read(manifest.step, manifest.rank, number, 0, bucket.size)
                except StoreError as error:
                    wrong.append(f"{place}, bucket {number}: {error}")
                    continue
                finally:
                    self._read(bucket.size)
                if digest(data) != bucket.digest:
                    wrong.append(f"{place}, bucket {number}: wrong checksum")
                for part, index, begin, end, result in _places(manifest, number):
                    tensor, piece = manifest.tensors[part.tensor], manifest.piece(part)
                    try:
                        changes = frame.unpack(data[begin:end])
                    except FrameError as error:
                        wrong.append(f"{place}, {tensor.name}, frame {index}: {error}")
                    else:
                        yield _Frame(manifest.rank, tensor, piece, index, changes, result)

    def _still_there(self, step: Step, wrong: list[str]) -> list[str]:
        """A step that its publisher has removed meanwhile is not damaged."""
        return wrong if wrong and step in self._store.steps() else []


def _tried(one: _Frame, copy: Copy) -> np.ndarray[Any, Any]:
    """What the frame becomes; `TransferError` if it does not fit the copy of its base."""
    if copy.tensors.get(one.tensor.name) != one.tensor:
        what = f"{one.tensor.dtype} of {one.tensor.shape}"
        raise TransferError(f"{one.tensor.name}, frame {one.number}: {what} only in this step")
    return copy.patched(one.piece, one.number, one.changes, one.result)


def _check(one: _Frame) -> None:
    """All that can be said of a frame without its base."""
    elements = min(FRAME, size(one.piece.box) - one.number * FRAME)
    try:
        check(one.changes, elements, np.dtype(UNSIGNED[WIDTHS[one.tensor.dtype]]))
    except FrameError as error:
        raise TransferError(f"{one.tensor.name}, frame {one.number}: {error}") from error


def _same(name: str, one: Copy, other: Copy) -> bool:
    alike = one.tensors.get(name) == other.tensors.get(name)
    return alike and np.array_equal(one.arrays[name], other.arrays[name])


def _places(manifest: Manifest, bucket: int) -> Iterator[tuple[Part, int, int, int, bytes]]:
    """Of every frame in a bucket: its part and number there, its first byte, one past its last,
    and the checksum of what results."""
    table = manifest.table()
    firsts = [part.first for part in manifest.parts]
    for row in np.flatnonzero((table["bucket"] == bucket) & (table["length"] > 0)).tolist():
        part = manifest.parts[bisect_right(firsts, row) - 1]
        begin, length = int(table["offset"][row]), int(table["length"][row])
        result = bytes(table["digest"][row]).ljust(DIGEST, b"\0")
        yield part, row - part.first, begin, begin + length, result


def named(step: Step) -> str:
    return f"version {step.version} ({'anchor' if step.base is None else f'from {step.base}'})"
