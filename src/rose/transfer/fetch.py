"""Read frames of a step from a store: neighbours in one read, so many bytes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from rose.transfer.ahead import in_order
from rose.transfer.layout import Piece
from rose.transfer.manifest import Manifest, Part
from rose.transfer.store.base import Store

READ = 1 << 20
"""Most bytes of one read: what has come is used while the rest is coming."""
AHEAD = 4
"""Reads on their way at once: on a long link answers take longer than their bytes."""
HOLE = 64 << 10
"""Bytes between two wanted frames that are read along: cheaper than another request."""


class Fetched(NamedTuple):
    piece: Piece
    number: int
    data: bytes
    result: bytes
    """Checksum of the elements after the update."""


def fetch(
    store: Store, manifest: Manifest, wanted: Iterable[tuple[Part, Iterable[int]]]
) -> Iterator[Fetched]:
    """The frames of these numbers of these parts, those that changed, in order of their bytes."""
    table = manifest.table()
    places = [
        (int(row["bucket"]), int(row["offset"]), int(row["length"]), part, index)
        for part, indices in wanted
        for index in indices
        if (row := table[part.first + index])["length"]
    ]
    places.sort(key=lambda place: place[:2])
    reads = list(_near(places))
    work = (partial(_read, store, manifest, near) for near in reads)
    answers = in_order(work, max(1, min(AHEAD, len(reads))), AHEAD, "rose-fetch")
    for near, data in zip(reads, answers, strict=True):
        begin = near[0][1]
        for _, offset, length, part, index in near:
            own = data[offset - begin : offset - begin + length]
            result = _digest(table[part.first + index])
            yield Fetched(manifest.piece(part), index, own, result)


def _read(store: Store, manifest: Manifest, near: list[tuple[int, int, int, Part, int]]) -> bytes:
    bucket, begin = near[0][:2]
    end = max(offset + length for _, offset, length, _, _ in near)
    return store.read(manifest.step, manifest.rank, bucket, begin, end - begin)


def _near(
    places: list[tuple[int, int, int, Part, int]],
) -> Iterator[list[tuple[int, int, int, Part, int]]]:
    near: list[tuple[int, int, int, Part, int]] = []
    for place in places:
        bucket, offset, length = place[:3]
        if near:
            same = bucket == near[0][0]
            close = offset - (near[-1][1] + near[-1][2]) <= HOLE
            if not (same and close and offset + length - near[0][1] <= READ):
                yield near
                near = []
        near.append(place)
    if near:
        yield near


def _digest(row: np.void) -> bytes:
    """numpy cuts zero bytes off the end of a string."""
    found: bytes = row["digest"]
    return found.ljust(16, b"\0")
