"""A host's copy of the weights at one version, in checkpoint coordinates, mapped from a file.

    FOLDER/state        which version the file has, and of which tensors; replaced whole
    FOLDER/weights-N    all tensors, one after the other
    FOLDER/updating     locked by who brings it to another version
    FOLDER/reading      locked by who reads it, all at once, or by who patches it, alone

All engines of a host map the same file. Deltas are patched in place, after every frame has been
tried on a scratch copy; while they are, `state` says so, and a copy found in that state is not used
before the update is done again (values are absolute, so that is safe). An anchor makes a new file.
The kernel opens the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rose.transfer import layout
from rose.transfer.delta import UNSIGNED, Bits, Changes, FrameError, patch
from rose.transfer.errors import TransferError
from rose.transfer.layout import FRAME, Box, Piece, Shard
from rose.transfer.manifest import WIDTHS, Tensor, digest

ALIGNED = 4096
Array = np.ndarray[Any, Any]


class State(msgspec.Struct, frozen=True):
    job: str
    version: int
    tensors: list[Tensor]
    file: str
    slices: str = ""
    """Digest of the boxes that are kept up to date; empty when everything is."""
    changing: bool = False
    """An update was being written: the file is between two versions."""


class Copy:
    """Arrays of bits by name, mapped from a file."""

    def __init__(self, path: Path, tensors: Sequence[Tensor]) -> None:
        """Makes the file if it is not there: all zeros, what an anchor is a difference to."""
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.arrays: dict[str, Array] = {}
        self._offsets, end = {}, 0
        for tensor in tensors:
            self._offsets[tensor.name] = end
            end += -(-tensor.elements * WIDTHS[tensor.dtype] // ALIGNED) * ALIGNED
        with path.open("ab") as file:
            file.truncate(max(end, 1))
            self.inode = os.fstat(file.fileno()).st_ino
            """Which file is mapped, whatever has its name by now."""
        for tensor in tensors:
            kind, offset = UNSIGNED[WIDTHS[tensor.dtype]], self._offsets[tensor.name]
            mapped = np.memmap(path, kind, "r+", offset, tensor.shape or (1,))
            self.arrays[tensor.name] = np.asarray(mapped).reshape(tensor.shape)

    def reserve(self, shards: Sequence[Shard] | None) -> None:
        """Have room on disk for what will come: a mapped file that finds none later kills."""
        boxes = {(name, layout.whole(tensor.shape)) for name, tensor in self.tensors.items()}
        if shards is not None:
            boxes = {(s.tensor, s.box) for s in shards if s.tensor in self.tensors}
        with self.path.open("r+b") as file:
            for name, box in boxes:
                array = self.arrays[name]
                rows = slice(*box[0]) if box else ...
                start = self._offsets[name] + (array[rows].ctypes.data - array.ctypes.data)
                os.posix_fallocate(file.fileno(), start, array[rows].nbytes)

    def patched(self, piece: Piece, index: int, changes: Changes, result: bytes) -> Bits:
        """What a frame becomes; it must have the checksum `result`."""
        elements = self._frame(piece, index)
        try:
            patch(elements, changes)
        except FrameError as error:
            raise TransferError(f"{piece.tensor}, frame {index}: {error}") from error
        if digest(elements) != result:
            raise TransferError(f"{piece.tensor}, frame {index}: wrong checksum after the update")
        return elements

    def apply(self, piece: Piece, index: int, changes: Changes) -> None:
        """What `patched` has accepted."""
        if (own := self._run(piece, index)) is not None:
            patch(own, changes)
            return
        elements = self._frame(piece, index)
        patch(elements, changes)
        self.put(piece, index, elements)

    def put(self, piece: Piece, index: int, elements: Bits) -> None:
        array, at = self.arrays[piece.tensor], 0
        for box in boxes(piece, index):
            view = _view(array, box)
            view[...] = elements[at : at + view.size].reshape(view.shape)
            at += view.size

    def _frame(self, piece: Piece, index: int) -> Bits:
        """The elements of a frame, as a copy of their own."""
        if (own := self._run(piece, index)) is not None:
            return own.copy()
        array = self.arrays[piece.tensor]
        return np.concatenate([_view(array, box).reshape(-1) for box in boxes(piece, index)])

    def _run(self, piece: Piece, index: int) -> Bits | None:
        """The elements of a frame where they are, if the piece has whole rows of its tensor."""
        array = self.arrays[piece.tensor]
        if piece.box[1:] != layout.whole(array.shape[1:]):
            return None
        first = piece.box[0][0] * (array.size // array.shape[0]) if piece.box else 0
        begin = index * FRAME
        end = min(begin + FRAME, layout.size(piece.box))
        run: Bits = array.reshape(-1)[first + begin : first + end]
        return run


def boxes(piece: Piece, index: int) -> list[Box]:
    """The boxes of a frame of a piece, in its order, in coordinates of the tensor."""
    shape = tuple(stop - start for start, stop in piece.box)
    begin = index * FRAME
    end = min(begin + FRAME, layout.size(piece.box))
    return [
        tuple((start + a, start + b) for (start, _), (a, b) in zip(piece.box, box, strict=True))
        for box in layout.run(shape, begin, end)
    ]


@contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Hold a lock of the kernel: `fcntl.LOCK_SH` with others, `LOCK_EX` alone."""
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


def read_state(folder: Path) -> State | None:
    try:
        return msgspec.json.decode((folder / "state").read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise TransferError(f"{folder / 'state'}: {error}") from error


def write_state(folder: Path, state: State) -> None:
    draft = folder / "state.draft"
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / "state")


def _view(array: Array, box: Box) -> Array:
    index: Any = (..., *(slice(start, stop) for start, stop in box))
    view: Array = array[index]
    return view
