"""From a host's copy into a worker's live parameters: all that can be done before the pause.

`Live.stage` makes a list of places and values, already in the engine's dtype, that `Staged.apply`
writes in the pause. Where the parameters are known to be the version that the last update began
with, the list is that update's; otherwise (an engine just started, a copy that another engine
updated, an anchor) the copy is compared with the live parameters, bit for bit, and how they came to
be what they are does not matter. Layers whose kernels keep a packed copy of their own (oneDNN and
others on CPUs) are packed a second time then, and `apply` swaps the kernels; from there on a list
of changes goes into the packed memory, if it was found (see `packed`).

The same code for any device. On a GPU (not yet run) blocks of the copy are compared there, and
`apply` scatters on the device.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rose.transfer.copy import Array, Copy
from rose.transfer.delta import Changes, places
from rose.transfer.errors import TransferError
from rose.transfer.layout import FRAME, Box, Piece, Shape, size, whole
from rose.transfer.manifest import Tensor, digest
from rose.transfer.vllm.packed import Packed
from rose.transfer.vllm.placement import Placed, Placement
from rose.transfer.weights import SIGNED

Frames = Sequence[tuple[Piece, int, Changes]]
DENSE = 8
"""A block of which more than one in so many elements differ is written whole: a place takes as much
memory as two to four values."""
AS_LOADED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's ways to keep weights that change nothing but, perhaps, their order; others transform."""


@dataclass
class Staged:
    """What makes the live parameters another version."""

    version: int
    elements: int = 0
    writes: list[Callable[[], object]] = field(default_factory=list)

    def apply(self) -> None:
        for write in self.writes:
            write()


class _Spots(NamedTuple):
    memory: torch.Tensor
    where: Array
    bits: torch.Tensor


class _Scattered:
    """Elements that change, by the memory they are in."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = {}

    def add(self, spots: _Spots) -> None:
        memory = spots.memory
        _, where, values = self._found.setdefault(memory.data_ptr(), (memory, [], []))
        where.append(torch.from_numpy(spots.where))
        values.append(spots.bits)

    def into(self, staged: Staged) -> None:
        for memory, where, values in self._found.values():
            spots, bits = torch.cat(where).to(memory.device), torch.cat(values).to(memory.device)
            staged.elements += spots.numel()
            staged.writes.append(partial(memory.index_copy_, 0, spots, bits))


class Live:
    """A worker's parameters, by the slices of the checkpoint that they hold."""

    def __init__(self, model: torch.nn.Module, placement: Placement) -> None:
        self._placement = placement
        self._by_tensor: dict[str, list[Placed]] = defaultdict(list)
        for placed in placement.placed.values():
            for one in placed:
                self._by_tensor[one.tensor].append(one)
        self._modules = dict(model.named_modules())
        self._rooms: dict[Shape, torch.Tensor] = {}
        """Where weights are put together before they are packed, by shape."""
        self._packed: dict[str, Packed] = {}
        """Where kernels keep parameters, of those that were found."""
        self._mapped: dict[tuple[Piece, int], tuple[Changes, list[_Spots]]] = {}
        """What `expect` has done already."""
        if any(self._packers()):
            _keep_freed_memory()
        for name in placement.placed:
            self._check(name)

    def expect(self, copy: Copy, piece: Piece, index: int, changes: Changes) -> None:
        """A frame that will likely be staged; most of the work is done while others are coming."""
        if not _is_dense(changes):
            self._mapped[piece, index] = changes, self._map(copy, piece, index, changes, set())

    def stage(
        self, copy: Copy, version: int, taken: Frames | None, early: bool = False
    ) -> Staged | None:
        """`taken`: all that changed since the version of the parameters; None if not known.

        `early`: the copy is not that version yet; None if its elements are needed.
        """
        staged = Staged(version)
        compared = changed = set(copy.tensors)
        if taken is not None:
            changed = {piece.tensor for piece, _, _ in taken}
            compared = {piece.tensor for piece, _, changes in taken if _is_dense(changes)}
        anew = self._to_pack(changed, compared)
        if early and (compared or anew):
            return None
        scattered = _Scattered()
        for piece, index, changes in taken or ():
            if piece.tensor not in compared:
                for spots in self._known(copy, piece, index, changes, anew):
                    scattered.add(spots)
        self._mapped.clear()
        scattered.into(staged)
        for tensor in compared:
            for one in self._by_tensor.get(tensor, ()):
                if (parameter := self._parameter(one.parameter)).numel():
                    _stage(_flat(parameter), one, copy, staged)
        self._stage_packed(copy, anew, staged)
        return staged

    def _known(
        self, copy: Copy, piece: Piece, index: int, changes: Changes, anew: set[str]
    ) -> list[_Spots]:
        expected, spots = self._mapped.get((piece, index), (None, []))
        if expected is changes and not anew:
            return spots
        return self._map(copy, piece, index, changes, anew)

    def _map(
        self, copy: Copy, piece: Piece, index: int, changes: Changes, anew: set[str]
    ) -> list[_Spots]:
        """What a frame changes, wherever its elements are; layers packed `anew` come later."""
        found: list[_Spots] = []
        tensor = copy.tensors[piece.tensor]
        inside, first = places(changes), index * FRAME
        values = torch.from_numpy(changes.values.view(f"i{changes.values.itemsize}"))
        values = values.view(getattr(torch, tensor.dtype))
        for one in self._by_tensor.get(piece.tensor, ()):
            parameter = self._parameter(one.parameter)
            packed = None if one.parameter in anew else self._packed.get(one.parameter)
            if not parameter.numel() and packed is None:
                continue
            here, spots = _mapped(inside, first, piece.box, one, tensor.shape)
            bits = _as_bits(_exactly(values, parameter.dtype, one.tensor))
            if here is not None:
                bits, spots = bits[torch.from_numpy(here)], spots[here]
            if parameter.numel():
                found.append(_Spots(_as_bits(_flat(parameter)), spots, bits))
            if packed is not None:
                found.append(_Spots(packed.memory, packed.places(spots), bits))
        return found

    def digests(self, tensors: dict[str, Tensor]) -> list[tuple[str, Box, str]]:
        """Checksums of all slices as the kernels see them, in the dtypes of these tensors."""
        packers = dict(self._packers())
        found = []
        for name, placed in self._placement.placed.items():
            users = [user for user in packers if self._source(user) == name]
            views = [self._unpacked(user, packers[user]) for user in users]
            if (parameter := self._parameter(name)).numel():
                views.append(parameter)
            for one in placed:
                wire = getattr(torch, tensors[one.tensor].dtype)
                for view in views:
                    part = view.as_strided(one.shape, one.stride, one.offset)
                    narrow = part.to(wire)
                    exact = torch.equal(_as_bits(narrow.to(part.dtype)), _as_bits(part))
                    bits = _as_bits(narrow).cpu().contiguous().numpy()
                    found.append((one.tensor, one.box, digest(bits).hex() if exact else "inexact"))
        return found

    # ---- packed layers

    def _packers(self) -> Iterator[tuple[str, Any]]:
        """Modules that compute with a packed copy: their kernels hold it in a closure."""
        for name, module in self._modules.items():
            if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
                yield name, module

    def _source(self, module: str) -> str:
        return self._placement.same[f"{module}.weight"]

    def _to_pack(self, changed: set[str], compared: set[str]) -> set[str]:
        """Parameters that kernels have to be made anew for: what changed is not known element by
        element, or not where they keep it."""
        sources = {self._source(name) for name, _ in self._packers()}
        return {
            source
            for source in sources
            if not (compared if source in self._packed else changed).isdisjoint(
                one.tensor for one in self._placement.placed.get(source, ())
            )
        }

    def _stage_packed(self, copy: Copy, anew: set[str], staged: Staged) -> None:
        """Pack layers a second time. Tied ones share a kernel."""
        kernels: dict[str, Any] = {}
        for name, module in self._packers():
            if (source := self._source(name)) not in anew:
                continue
            if source not in kernels:
                placed = self._placement.placed[source]
                weight = self._put_together(source, placed, copy)
                kernel = kernels[source] = _pack(module, weight)
                staged.elements += sum(map(size, (one.box for one in placed)))
                packed = Packed.find(kernel, weight)
                if packed is not None:
                    staged.writes.append(partial(self._packed.__setitem__, source, packed))
                elif source in self._packed:
                    staged.writes.append(partial(self._packed.__delitem__, source))
            staged.writes.append(partial(setattr, module, "cpu_linear", kernels[source]))

    def _put_together(self, source: str, placed: list[Placed], copy: Copy) -> torch.Tensor:
        """A weight as it is loaded."""
        loaded = self._placement.parameters[source]
        weight = self._rooms.get(loaded.shape)
        if weight is None:
            dtype = self._parameter(source).dtype
            weight = self._rooms[loaded.shape] = torch.zeros(loaded.shape, dtype=dtype)
        elif sum(size(one.box) for one in placed) < weight.numel():
            weight.zero_()
        for one in placed:
            wire = getattr(torch, copy.tensors[one.tensor].dtype)
            bits = _slice(copy, one)
            new = torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(wire)
            _exactly(new[:0], weight.dtype, one.tensor)
            _flat(weight).as_strided(one.shape, one.stride, one.offset).copy_(new)
        return weight

    def _unpacked(self, name: str, module: Any) -> torch.Tensor:
        """What a packed kernel multiplies with: its product with the unit matrix is exact."""
        columns = self._placement.parameters[self._source(name)].shape[1]
        weight = module._parameters["weight"]
        product: torch.Tensor = module.cpu_linear(
            torch.eye(columns, dtype=weight.dtype), weight, None
        )
        return product.t().contiguous()

    # ---- checks

    def _parameter(self, name: str) -> torch.Tensor:
        module, _, own = name.rpartition(".")
        parameter: torch.Tensor = self._modules[module]._parameters[own].data
        return parameter

    def _check(self, name: str) -> None:
        """Raise unless what is written to a parameter is what the model computes with."""
        module = self._modules[name.rpartition(".")[0]]
        method = type(getattr(module, "quant_method", None)).__name__
        if hasattr(module, "quant_method") and method not in AS_LOADED:
            raise TransferError(f"{name} is kept by vLLM's {method}, which rose cannot update")
        live, loaded = self._parameter(name), self._placement.parameters[name]
        emptied = not live.numel() and getattr(module, "cpu_linear", None) is not None
        if not emptied and (live.shape, live.stride()) != (loaded.shape, loaded.stride()):
            raise TransferError(
                f"{name} is kept as {tuple(live.shape)}, but was loaded as {tuple(loaded.shape)}"
            )


def _pack(module: Any, weight: torch.Tensor) -> Any:
    second = torch.nn.Module()
    second.weight = torch.nn.Parameter(weight, requires_grad=False)
    second.bias = getattr(module, "bias", None)
    module.quant_method.process_weights_after_loading(second)
    return second.cpu_linear


def _keep_freed_memory() -> None:
    """Let the C library give freed memory to the next packed layers instead of to the kernel.

    Fresh pages cost several times what packing does. The price is memory for those layers twice,
    also between versions.
    """
    trim_threshold, mmap_max = -1, -4  # malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def _stage(flat: torch.Tensor, one: Placed, copy: Copy, staged: Staged) -> None:
    """Note what of a slice is different in the parameter whose memory is `flat`."""
    wire = getattr(torch, copy.tensors[one.tensor].dtype)
    memory = _as_bits(flat)
    for block, shape, offset in _blocks(_slice(copy, one), one):
        new = torch.from_numpy(block.view(f"i{block.itemsize}")).view(wire).to(flat.device)
        bits = _as_bits(_exactly(new, flat.dtype, one.tensor)).reshape(shape)
        old = memory.as_strided(shape, one.stride, offset)
        where = (bits != old).reshape(-1).nonzero().squeeze(1)
        staged.elements += where.numel()
        if where.numel() * DENSE > bits.numel():
            staged.writes.append(partial(old.copy_, bits.clone()))
        elif where.numel():
            values = bits.reshape(-1)[where]
            spots = _spots(where, shape, one.stride, offset)
            staged.writes.append(partial(memory.index_copy_, 0, spots, values))


def _mapped(
    inside: Array, first: int, box: Box, one: Placed, shape: Shape
) -> tuple[Array | None, Array]:
    """Elements of a box, numbered from `first` on: which are in a slice (None: all), and where in
    memory."""
    if (run := _run(box, one, shape)) is not None:
        size_, shift, is_inside = run
        numbers = np.add(inside, first + shift, dtype=np.int64)
        if is_inside:
            return None, numbers
        return (numbers >= one.offset) & (numbers < one.offset + size_), numbers
    numbers = np.add(inside, first, dtype=np.int64)
    extents = tuple(stop - start for start, stop in box)
    here, spots = np.ones(numbers.size, bool), np.full(numbers.size, one.offset)
    for at, (first, _), (start, stop), stride in zip(
        np.unravel_index(numbers, extents), box, one.box, one.stride, strict=True
    ):
        here &= (at + first >= start) & (at + first < stop)
        spots += (at + first - start) * stride
    return here, spots


@cache
def _run(box: Box, one: Placed, shape: Shape) -> tuple[int, int, bool] | None:
    """If a box and a slice are runs of their tensor: the slice's size, the distance from numbers in
    the box to spots, and whether all of the box is in the slice."""
    rows, slice_rows = _rows(box, shape), _rows(one.box, shape)
    if rows is None or slice_rows is None or not _is_contiguous(one.shape, one.stride):
        return None
    is_inside = rows[0] >= slice_rows[0] and rows[1] <= slice_rows[1]
    return slice_rows[1] - slice_rows[0], rows[0] - slice_rows[0] + one.offset, is_inside


def _rows(box: Box, shape: Shape) -> tuple[int, int] | None:
    """The numbers of a box's elements in its tensor, if they are one run."""
    if box[1:] != whole(shape[1:]):
        return None
    row = math.prod(shape[1:])
    return (box[0][0] * row, box[0][1] * row) if box else (0, 1)


def _is_contiguous(shape: Shape, stride: Shape) -> bool:
    return stride == tuple(torch.empty(shape, device="meta").stride())


def _is_dense(changes: Changes) -> bool:
    return changes.values.size * DENSE > changes.elements


def _exactly(values: torch.Tensor, dtype: torch.dtype, tensor: str) -> torch.Tensor:
    if torch.promote_types(values.dtype, dtype) != dtype:
        raise TransferError(f"{tensor} comes as {values.dtype}, which {dtype} cannot hold exactly")
    return values.to(dtype)


def _blocks(slice_: Array, one: Placed) -> Iterator[tuple[Array, Shape, int]]:
    """Rows of a slice, some at a time: their bits, shape, and where they begin in memory."""
    if not one.shape:
        yield np.ascontiguousarray(slice_).reshape(-1), (), one.offset
        return
    rows = max(1, FRAME // max(1, math.prod(one.shape[1:])))
    for first in range(0, one.shape[0], rows):
        part = slice_[first : first + rows]
        yield np.ascontiguousarray(part), part.shape, one.offset + first * one.stride[0]


def _spots(where: torch.Tensor, shape: Shape, stride: Shape, offset: int) -> torch.Tensor:
    """Of elements of a block, by their number in it, where they are in memory."""
    if _is_contiguous(shape, stride):
        return where + offset
    spots = torch.full_like(where, offset)
    for coordinate, step in zip(torch.unravel_index(where, shape), stride, strict=True):
        spots += coordinate * step
    return spots


def _slice(copy: Copy, one: Placed) -> Array:
    index: Any = tuple(slice(start, stop) for start, stop in one.box)
    found: Array = np.ascontiguousarray(copy.arrays[one.tensor][index])
    return found


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """All the memory that a parameter is in."""
    elements = parameter.untyped_storage().nbytes() // parameter.element_size()
    return parameter.as_strided((elements,), (1,), 0)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(SIGNED[tensor.element_size()])
