"""What changed between two versions of the same weights, bit for bit.

Weights are compared as bits, never as numbers: -0.0 differs from 0.0, and every NaN keeps its
payload. A *frame* is a run of up to `FRAME` elements of one tensor, coded in chunks of `CHUNK`:

    empty     nothing changed
    sparse    gaps between changed elements, one byte each, and their new values
    dense     all new values

whichever is smallest. Values are absolute, so applying a frame twice does no harm. A gap is the
number of unchanged elements before a changed one; 255 stands for 255 of them and none changed.

`diff` and `patch` are the hot loops (numba, without the interpreter's lock, so frames run in
threads); `diff_plainly` and `patch_plainly` say the same in numpy, for tests. `merge` makes one
difference of several that follow each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.cpython.unsafe.numbers import trailing_zeros

from rose.transfer.lanes import LANES, differing, ones, prefetch
from rose.transfer.layout import CHUNK, FRAME

ESCAPE = 255

Bits = np.ndarray[Any, np.dtype[Any]]
"""Flat unsigned integers as wide as the elements."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Kind(IntEnum):
    EMPTY = 0
    SPARSE = 1
    DENSE = 2


_DENSE = np.uint8(Kind.DENSE)


class Changes(NamedTuple):
    """A frame's difference, decoded."""

    elements: int
    kinds: Bits
    """One `Kind` per chunk."""
    counts: Bits
    """Changed elements per chunk; all of them in a dense one."""
    gaps: Bits
    """Of all sparse chunks, one after the other."""
    values: Bits
    """Of all sparse and dense chunks."""

    @property
    def changed(self) -> int:
        """Elements that are sent; a dense chunk counts whole."""
        return int(self.counts.sum())


class FrameError(ValueError):
    """A frame that does not say what a frame can say; nothing of it may be used."""


def bits(array: np.ndarray[Any, Any]) -> Bits:
    """The elements of an array as flat unsigned integers; a view if it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    try:
        return flat.view(UNSIGNED[flat.dtype.itemsize])
    except KeyError:
        raise TypeError(f"elements of {flat.dtype.itemsize} bytes are not supported") from None


def diff(old: Bits, new: Bits) -> Changes:
    """What turns `old` into `new`."""
    _alike(old, new)
    chunks = -(-new.size // CHUNK)
    kinds, counts = np.zeros(chunks, np.uint8), np.zeros(chunks, np.uint32)
    gaps, values = _scratch(new.dtype)
    used = _diff(old, new, kinds, counts, gaps, values)
    return Changes(new.size, kinds, counts, gaps[: used[0]].copy(), values[: used[1]].copy())


def patch(weights: Bits, changes: Changes) -> None:
    """Make `weights`, the old version, the new one; all of it or, if `changes` is bad, nothing."""
    _put(weights, changes.kinds, changes.counts, changes.values, _checked(changes, weights))


def places(changes: Changes) -> Bits:
    """Where in its frame each value goes."""
    sparse = _checked(changes, _nothing(changes.values.dtype)[: changes.elements])
    if _DENSE not in changes.kinds:
        return sparse
    found, used = [np.empty(0, np.uint32)], 0
    for chunk, (kind, count) in enumerate(zip(changes.kinds, changes.counts, strict=True)):
        if kind == Kind.DENSE:
            found.append(np.arange(chunk * CHUNK, chunk * CHUNK + count, dtype=np.uint32))
        elif kind == Kind.SPARSE:
            found.append(sparse[used : used + count])
            used += int(count)
    return np.concatenate(found)


def check(changes: Changes, elements: int, dtype: np.dtype[Any]) -> None:
    """Raise unless `changes` can be applied to so many elements."""
    _checked(changes, _nothing(dtype)[:elements])


@cache
def _nothing(dtype: np.dtype[Any]) -> Bits:
    """A frame of zeros that takes no memory, for what is only counted."""
    return np.broadcast_to(np.zeros(1, dtype), FRAME)


def _checked(changes: Changes, weights: Bits) -> Bits:
    """Where the values of sparse chunks go."""
    chunks = -(-weights.size // CHUNK)
    if changes.elements != weights.size or weights.size > FRAME:
        raise FrameError(f"a frame of {changes.elements} elements for {weights.size}")
    if changes.values.dtype != weights.dtype:
        raise FrameError(f"values of {changes.values.dtype} for weights of {weights.dtype}")
    if changes.kinds.size != chunks or changes.counts.size != chunks:
        raise FrameError(f"{changes.kinds.size} chunks instead of {chunks}")
    places = np.empty(min(changes.values.size, weights.size), np.uint32)
    _, kinds, counts, gaps, values = changes
    if said := _WRONG[_places(weights, kinds, counts, gaps, values.size, places)]:
        raise FrameError(said)
    return places


def _alike(old: Bits, new: Bits) -> None:
    if old.shape != new.shape or old.dtype != new.dtype or old.dtype not in UNSIGNED.values():
        raise ValueError(f"cannot compare {old.dtype}{old.shape} with {new.dtype}{new.shape}")
    if new.size > FRAME:
        raise ValueError(f"a frame has at most {FRAME} elements, got {new.size}")


_own = threading.local()

SAMPLE = 16 * LANES
"""Elements of a chunk that tell whether it may be worth counting."""


def _scratch(dtype: np.dtype[Any]) -> tuple[Bits, Bits]:
    """Room for the gaps and values of any frame; a thread's own, as fresh memory is slow."""
    room = FRAME + CHUNK // ESCAPE + 2 * LANES
    if not hasattr(_own, "gaps"):
        _own.gaps, _own.values = np.empty(room, np.uint8), np.empty(room, np.uint64)
    return _own.gaps, _own.values.view(dtype)[:room]


@njit(nogil=True, cache=True)
def _is_full(old: Bits, new: Bits, begin: int, end: int) -> bool:
    """Whether so many elements of a chunk differ that coding them would be in vain. Looks at all of
    them only if most of the first ones do."""
    differ, at = np.uint64(0), begin
    for last in (begin + SAMPLE, end):
        while at + LANES <= min(last, end):
            differ += ones(differing(old, new, at))
            at += LANES
        if 2 * differ < at - begin:
            return False
    return int(differ) * (1 + new.itemsize) >= (end - begin) * new.itemsize


@njit(nogil=True, cache=True)
def _diff(
    old: Bits, new: Bits, kinds: Bits, counts: Bits, gaps: Bits, values: Bits
) -> tuple[int, int]:
    """Fills the last four; returns how many gaps and values there are.

    A chunk that gets no smaller by being sparse is dense: so neither list outgrows the frame.
    """
    width = new.itemsize
    gap_end = value_end = 0
    for chunk in range(kinds.size):
        begin, end = chunk * CHUNK, min((chunk + 1) * CHUNK, new.size)
        gap, value, last = gap_end, value_end, begin - 1
        limit = (end - begin) * width
        at = begin
        if _is_full(old, new, begin, end):
            at, value = end, value_end + end - begin
        while at < end and (gap - gap_end) + (value - value_end) * width < limit:
            if at + LANES <= end:
                mask = differing(old, new, at)
            else:
                mask = np.uint64(0)
                for i in range(at, end):
                    mask |= np.uint64(old[i] != new[i]) << np.uint64(i - at)
            while mask:
                i = at + int(trailing_zeros(mask))
                mask &= mask - np.uint64(1)
                skipped = i - last - 1
                while skipped >= ESCAPE:
                    gaps[gap] = ESCAPE
                    gap += 1
                    skipped -= ESCAPE
                gaps[gap] = skipped
                values[value] = new[i]
                gap += 1
                value += 1
                last = i
            at += LANES
        if value == value_end:
            continue
        if (gap - gap_end) + (value - value_end) * width < limit:
            kinds[chunk] = 1
            counts[chunk] = value - value_end
            gap_end, value_end = gap, value
        else:
            kinds[chunk] = 2
            counts[chunk] = end - begin
            values[value_end : value_end + end - begin] = new[begin:end]
            value_end += end - begin
    return gap_end, value_end


_WRONG = (
    "",
    "an unknown kind of chunk",
    "a chunk with a wrong count",
    "a gap past the end of its chunk",
    "fewer gaps than the chunks need",
    "more gaps than the chunks need",
    "another number of values than the chunks need",
)


@njit(nogil=True, cache=True)
def _places(weights: Bits, kinds: Bits, counts: Bits, gaps: Bits, values: int, places: Bits) -> int:
    """Fills the last with where the values of sparse chunks go; returns an index into `_WRONG`, 0
    when `_put` will stay inside the weights and both lists.

    Unsigned throughout: numba then leaves out what signed indices from the end would need.
    """
    one, escape = np.uint64(1), np.uint64(ESCAPE)
    gap = place = value = np.uint64(0)
    gap_end, room = np.uint64(gaps.size), np.uint64(places.size)
    for chunk in range(kinds.size):
        begin = np.uint64(chunk * CHUNK)
        size = np.uint64(min(CHUNK, weights.size - chunk * CHUNK))
        kind, count = kinds[chunk], np.uint64(counts[chunk])
        if kind > 2:
            return 1
        if (kind == 0) != (count == np.uint64(0)) or count > size or (kind == 2 and count != size):
            return 2
        value += count
        if kind != 1:
            continue
        if value > np.uint64(values) or place + count > room:
            return 6
        place_end, at = place + count, begin
        while place < place_end:
            if gap == gap_end:
                return 4
            step = np.uint64(gaps[gap])
            gap += one
            at += step
            if step == escape:
                continue
            prefetch(weights, np.int64(at))
            places[place] = np.uint32(at)
            place += one
            at += one
        if at > begin + size:
            return 3
    if gap != gap_end:
        return 5
    return 6 if value != np.uint64(values) else 0


@njit(nogil=True, cache=True)
def _put(weights: Bits, kinds: Bits, counts: Bits, values: Bits, places: Bits) -> None:
    value = place = 0
    for chunk in range(kinds.size):
        count = int(counts[chunk])
        mine = values[value : value + count]
        value += count
        if kinds[chunk] == 2:
            weights[chunk * CHUNK : chunk * CHUNK + count] = mine
        elif kinds[chunk] == 1:
            where = places[place : place + count]
            for i in range(count):
                weights[where[i]] = mine[i]
            place += count


# ---- in numpy: what is not hot, and the twins


def merge(steps: Sequence[Changes]) -> Changes:
    """What all do one after the other. Raises `FrameError` if one of them does not fit the rest."""
    elements, dtype = steps[0].elements, steps[0].values.dtype
    latest, touched = np.empty(elements, dtype), np.zeros(elements, bool)
    for step in steps:
        if (step.elements, step.values.dtype) != (elements, dtype):
            raise FrameError(f"{step.elements} elements of {step.values.dtype} for {elements}")
        where = places(step)
        latest[where] = step.values
        touched[where] = True
    kinds, counts, gaps, values = [], [], [], []
    for begin in range(0, elements, CHUNK):
        where = np.flatnonzero(touched[begin : begin + CHUNK])
        counts.append(where.size)
        values.append(latest[begin + where])
        if where.size == min(CHUNK, elements - begin):
            kinds.append(Kind.DENSE)
        else:  # also where dense would be smaller: what did not change is unknown here
            kinds.append(Kind.SPARSE if where.size else Kind.EMPTY)
            gaps.append(_gaps(where))
    return _joined(elements, dtype, kinds, counts, gaps, values)


def diff_plainly(old: Bits, new: Bits) -> Changes:
    _alike(old, new)
    kinds, counts, gaps, values = [], [], [], []
    for begin in range(0, new.size, CHUNK):
        part = new[begin : begin + CHUNK]
        where = np.flatnonzero(old[begin : begin + CHUNK] != part)
        coded = _gaps(where)
        dense = where.size and coded.size + where.size * part.itemsize >= part.nbytes
        kinds.append(Kind.DENSE if dense else Kind.SPARSE if where.size else Kind.EMPTY)
        counts.append(part.size if dense else where.size)
        gaps.append(coded[:0] if dense else coded)
        values.append(part if dense else part[where])
    return _joined(new.size, new.dtype, kinds, counts, gaps, values)


def patch_plainly(weights: Bits, changes: Changes) -> None:
    for chunk, (where, values) in enumerate(_chunks(changes)):
        weights[chunk * CHUNK : (chunk + 1) * CHUNK][where] = values


def _sizes(elements: int) -> list[int]:
    return [min(CHUNK, elements - begin) for begin in range(0, elements, CHUNK)]


def _chunks(changes: Changes) -> Iterator[tuple[Bits, Bits]]:
    """Where each chunk changes, and to what."""
    gaps, values = changes.gaps.astype(np.int64), changes.values
    for kind, count in zip(changes.kinds, changes.counts, strict=True):
        mine, values = values[:count], values[count:]
        where = np.arange(count)
        if kind == Kind.SPARSE:
            ends = np.flatnonzero(gaps != ESCAPE)[:count]
            where += np.cumsum(gaps[: ends[-1] + 1])[ends]
            gaps = gaps[ends[-1] + 1 :]
        yield where, mine


def _gaps(where: Bits) -> Bits:
    """Of changes at these places of a chunk."""
    skipped = np.diff(where, prepend=-1) - 1
    escapes = skipped // ESCAPE
    coded = np.full(where.size + int(escapes.sum()), ESCAPE, np.uint8)
    coded[np.cumsum(escapes + 1) - 1] = skipped % ESCAPE
    return coded


def _joined(
    elements: int,
    dtype: np.dtype[Any],
    kinds: list[Kind],
    counts: list[int],
    gaps: list[Bits],
    values: list[Bits],
) -> Changes:
    return Changes(
        elements,
        np.array(kinds, np.uint8),
        np.array(counts, np.uint32),
        np.concatenate([np.empty(0, np.uint8), *gaps]),
        np.concatenate([np.empty(0, dtype), *values]),
    )
