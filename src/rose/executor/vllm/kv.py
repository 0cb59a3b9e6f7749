"""Physical KV memory on CPU: mapped lazily, returned to the system for parked blocks.

vLLM allocates all KV as one `torch.zeros`, touching every page at boot. `LazyZeros` backs that call
with an anonymous mapping instead: no physical memory until a block is written, and `release` gives
the pages of parked blocks back (`madvise(DONTNEED)`, so RSS really falls). A released block reads
as zeros when it is used again; vLLM never reads a block it has not written. `back` brings pages
before their blocks are used: a page that is missing costs the engine's step a fault.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PAGE = mmap.PAGESIZE
POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE (5.14), which Python does not name."""
_madvise = ctypes.CDLL(None).madvise
"""For bringing pages, which takes long: Python's own keeps its lock meanwhile. Giving them back is
quick and keeps the engine's thread out of the block pool; to wait for Python's lock after every
call would keep it out for longer."""
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True)
class Placement:
    """Where a set of layers keeps its blocks (vLLM's KVCacheTensor)."""

    offset: int
    layers: int
    layer_stride: int
    block_stride: int


class KvMemory:
    """The mapping behind one engine's KV cache."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self._map, dtype=torch.int8)
        self._base: int = self.tensor.data_ptr()
        self.placements: list[Placement] = []

    def release(self, blocks: Iterable[int]) -> None:
        """Give the physical pages of these blocks back; neighbours in use are left alone."""
        for start, end in self._ranges(blocks):
            start, end = _up(start), _down(end)
            if end > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def back(self, blocks: Iterable[int]) -> None:
        """Have the physical pages of these blocks now. Where the kernel cannot, they come when they
        are touched."""
        for start, end in self._ranges(blocks):
            start, end = _down(start), min(_up(end), self.size)
            _madvise(self._base + start, end - start, POPULATE_WRITE)

    def _ranges(self, blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Where these blocks lie: one range for each layer and each run of blocks."""
        for first, last in runs(sorted(blocks)):
            for place in self.placements:
                for layer in range(place.layers):
                    base = place.offset + layer * place.layer_stride
                    yield base + first * place.block_stride, base + (last + 1) * place.block_stride


def runs(ordered: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, last) ranges."""
    found: list[tuple[int, int]] = []
    for number in ordered:
        if found and found[-1][1] + 1 == number:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _up(value: int) -> int:
    return -(-value // PAGE) * PAGE


def _down(value: int) -> int:
    return value // PAGE * PAGE


class LazyZeros(TorchFunctionMode):
    """While active, the big int8 `torch.zeros` of the KV cache becomes a lazy mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: KvMemory | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.zeros and given.get("dtype") is torch.int8 and len(args) == 1:
            self.memory = KvMemory(int(args[0]))
            return self.memory.tensor
        return func(*args, **given)


MEMORY: KvMemory | None = None
"""The mapping of this process's engine, set by `ElasticWorker`. Scheduler and worker share a
process under UniProcExecutor; elsewhere it stays None and parking moves no physical memory."""
