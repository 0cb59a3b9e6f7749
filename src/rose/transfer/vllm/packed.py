"""Where a oneDNN kernel of vLLM keeps the elements of its layer, so that a few can be changed.

vLLM packs linear layers on CPUs into blocks that suit oneDNN and drops the original. The packed
copy is in memory that no function of vLLM or oneDNN gives out, so it is looked for: vLLM's handler
has a table of oneDNN memories, each with a description (dimensions, strides, blocks) and storage.
These are structures of C++ libraries, the same in oneDNN 3, but not promised. Hence nothing is
believed: memory is read through the kernel, which answers a wrong address with an error, and only
if every element of a layer is found, bit for bit, where the description says, may such layers be
changed. Otherwise they are packed a second time for every version, which is slower.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numba import njit

from rose.transfer.copy import Array
from rose.transfer.weights import SIGNED

WORD = 8
DIMS = 12
"""oneDNN's most dimensions."""
WEIGHTS = 33
"""DNNL_ARG_WEIGHTS, the key of the packed weights in the table."""
BLOCKED = 2
MOST_BLOCKS = 4
MOST_PADDING = 512
"""Rows or columns that blocks may add to a matrix."""
PIECE = 1 << 20
MOST_MEMORIES = 16
AT_ONCE = 64
"""Rows compared at once."""

_proven: set[tuple[torch.Size, torch.dtype, Blocks]] = set()
"""Layouts in which every element of a layer was found: of the next one the ends are compared."""

FIRST_MEMORY = 8
"""In words. Of vLLM's handler: the table's first entry, which is (next, key, memory, ...)."""
DESCRIPTION, STORAGE = 3, 99
"""Of a oneDNN memory: what it holds, and where its list of storages begins."""
DATA = 6
"""Of a storage."""


class Blocks(NamedTuple):
    """A matrix (in, out) in memory: inner blocks, and how far apart the outer ones are."""

    padded: tuple[int, ...]
    strides: tuple[int, ...]
    inner: tuple[tuple[int, int], ...]
    """Size and dimension of each, the last one contiguous."""

    @property
    def elements(self) -> int:
        return self.padded[0] * self.padded[1]

    def may_hold(self, rows: int, columns: int) -> bool:
        """Not less than the matrix, and not absurdly more."""
        pairs = zip(self.padded, (columns, rows), strict=True)
        fits = all(size <= padded < size + MOST_PADDING for padded, size in pairs)
        return fits and max(self.strides) <= self.elements

    def offsets(self, dimension: int, size: int) -> Array:
        """Of every index of a dimension: an element's place is the sum of both of its."""
        rest, offsets, stride = np.arange(size), np.zeros(size, np.int64), 1
        for block, of in reversed(self.inner):
            if of == dimension:
                offsets += rest % block * stride
                rest //= block
            stride *= block
        found: Array = offsets + rest * self.strides[dimension]
        return found


@dataclass(frozen=True)
class Packed:
    """The packed weight of a kernel; `memory` is its bits, `kernel` keeps it from being freed."""

    kernel: Any
    memory: torch.Tensor
    rows: Array
    columns: Array

    @classmethod
    def find(cls, kernel: Any, weight: torch.Tensor) -> Self | None:
        """None unless it is found, and is `weight` in every bit."""
        handler = _handler(kernel)
        if handler is None:
            return None
        try:
            blocks, address = _walk(handler)
        except LookupError:
            return None
        rows, columns = weight.shape
        size = blocks.elements * weight.element_size()
        if not blocks.may_hold(rows, columns) or not _is_readable(address, size):
            return None
        room = (ctypes.c_char * size).from_address(address)
        bits = weight.view(SIGNED[weight.element_size()])
        packed = cls(
            kernel,
            torch.frombuffer(room, dtype=bits.dtype),
            blocks.offsets(1, rows),
            blocks.offsets(0, columns),
        )
        layout = (weight.shape, weight.dtype, blocks)
        if not packed._is(bits, sample=layout in _proven):
            return None
        _proven.add(layout)
        return packed

    def places(self, spots: Array) -> Array:
        """Of elements of the layer's weight, by their number in it."""
        found = np.empty_like(spots)
        _spread(spots, self.rows, self.columns, found)
        return found

    def _is(self, bits: torch.Tensor, *, sample: bool) -> bool:
        if int(self.rows.max() + self.columns.max()) >= self.memory.numel():
            return False
        rows, columns = torch.from_numpy(self.rows), torch.from_numpy(self.columns)
        parts = list(zip(rows.split(AT_ONCE), bits.split(AT_ONCE), strict=True))
        return all(
            torch.equal(self.memory[some[:, None] + columns], part)
            for some, part in (parts[:: max(1, len(parts) - 1)] if sample else parts)
        )


@njit(nogil=True, cache=True)
def _spread(spots: Array, rows: Array, columns: Array, found: Array) -> None:
    """Most spots are a little further than the last: a division each would take longer."""
    row, first, width = 0, 0, columns.size
    for i in range(spots.size):
        spot = spots[i]
        if spot < first or spot >= first + width:
            row = spot // width
            first = row * width
        found[i] = rows[row] + columns[spot - first]


def _handler(kernel: Any) -> int | None:
    for cell in getattr(kernel, "__closure__", None) or ():
        pointer = getattr(cell.cell_contents, "handler_tensor", None)
        if isinstance(pointer, torch.Tensor):
            return int(pointer.item())
    return None


def _walk(handler: int) -> tuple[Blocks, int]:
    """From vLLM's handler to the description and address of the packed weights."""
    entry = _words(handler + FIRST_MEMORY * WORD, 1)[0]
    for _ in range(MOST_MEMORIES):
        entry, key, memory, _ = _words(entry, 4)
        if key & 0xFFFFFFFF == WEIGHTS:
            break
    else:
        raise LookupError("the handler has no weights")
    words = _words(memory, STORAGE + 1)
    storage = _words(words[STORAGE], 1)[0]
    return _blocks(words[DESCRIPTION:]), _words(storage, DATA + 1)[DATA]


def _blocks(words: tuple[int, ...]) -> Blocks:
    """A description is: how many dimensions, dims, data type, padded dims, padded offsets, offset,
    format, strides, how many inner blocks, their sizes, their dimensions."""
    at_padded = 1 + DIMS + 1
    at_offset = at_padded + 2 * DIMS
    at_strides = at_offset + 2
    at_blocks = at_strides + DIMS
    dimensions, blocks = words[0] >> 32, words[at_blocks]
    formats = words[at_offset + 1] & 0xFFFFFFFF
    if dimensions != 2 or words[at_offset] or formats != BLOCKED or blocks > MOST_BLOCKS:
        raise LookupError("the weights are not a matrix of blocks")
    sizes = words[at_blocks + 1 : at_blocks + 1 + blocks]
    of = words[at_blocks + 1 + DIMS : at_blocks + 1 + DIMS + blocks]
    if 0 in sizes or not set(of) <= {0, 1}:
        raise LookupError("the blocks are none")
    return Blocks(
        words[at_padded : at_padded + 2],
        words[at_strides : at_strides + 2],
        tuple(zip(sizes, of, strict=True)),
    )


def _is_readable(address: int, size: int) -> bool:
    """All of it, asked of the kernel: touching what is not there would end the process."""
    room = ctypes.create_string_buffer(PIECE)
    return all(_copy(address + at, room, min(PIECE, size - at)) for at in range(0, size, PIECE))


def _words(address: int, count: int) -> tuple[int, ...]:
    """Of this process's memory; LookupError if there is none at that address."""
    found = (ctypes.c_uint64 * count)()
    if not _copy(address, found, ctypes.sizeof(found)):
        raise LookupError(f"nothing to be read at {address:#x}")
    return tuple(found)


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _copy(address: int, into: ctypes.Array[Any], size: int) -> bool:
    """By the kernel, which answers a wrong address with an error."""
    here, there = _Range(ctypes.addressof(into), size), _Range(address, size)
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    return read is not None and size == read(
        os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0
    )
