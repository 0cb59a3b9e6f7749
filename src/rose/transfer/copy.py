"""A host's copy of the weights at one version, in checkpoint coordinates, mapped from a file.

    FOLDER/state        which version the file has, and of which tensors; replaced whole
    FOLDER/weights-N    all tensors, one after the other

All engines of a host map the same file. Deltas are patched in place, after every frame has been
tried on a scratch copy; while they are, `state` says so, and a copy found in that state is not used
before the update is done again (values are absolute, so that is safe). An anchor makes a new file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rose.transfer import layout
from rose.transfer.delta import FRAME, UNSIGNED, Bits, Changes, FrameError, patch
from rose.transfer.layout import Box, Piece
from rose.transfer.manifest import WIDTHS, Tensor, digest

ALIGNED = 4096
Array = np.ndarray[Any, Any]


class TransferError(RuntimeError):
    """An update that cannot be taken; the version before it is still whole."""


class State(msgspec.Struct, frozen=True):
    job: str
    version: int
    tensors: list[Tensor]
    file: str
    changing: bool = False
    """An update was being written: the file is between two versions."""


class Copy:
    """Arrays of bits by name, mapped from a file."""

    def __init__(self, path: Path, tensors: Sequence[Tensor]) -> None:
        """Makes the file if it is not there: all zeros, what an anchor is a difference to."""
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.arrays: dict[str, Array] = {}
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.elements * WIDTHS[tensor.dtype] // ALIGNED) * ALIGNED
        with path.open("ab") as file:
            file.truncate(max(end, 1))
        for tensor, offset in zip(tensors, offsets, strict=True):
            self.arrays[tensor.name] = np.memmap(
                path, UNSIGNED[WIDTHS[tensor.dtype]], "r+", offset, tensor.shape or (1,)
            ).reshape(tensor.shape)

    def frame(self, piece: Piece, index: int) -> Bits:
        """The elements of a frame, as a copy of their own."""
        array = self.arrays[piece.tensor]
        return np.concatenate([_view(array, box).reshape(-1) for box in boxes(piece, index)])

    def put(self, piece: Piece, index: int, elements: Bits) -> None:
        array, at = self.arrays[piece.tensor], 0
        for box in boxes(piece, index):
            view = _view(array, box)
            view[...] = elements[at : at + view.size].reshape(view.shape)
            at += view.size

    def patched(self, piece: Piece, index: int, changes: Changes, result: bytes) -> Bits:
        """What a frame becomes; it must have the checksum `result`."""
        elements = self.frame(piece, index)
        try:
            patch(elements, changes)
        except FrameError as error:
            raise TransferError(f"{piece.tensor}, frame {index}: {error}") from error
        if digest(elements) != result:
            raise TransferError(f"{piece.tensor}, frame {index}: wrong checksum after the update")
        return elements


def boxes(piece: Piece, index: int) -> list[Box]:
    """The boxes of a frame of a piece, in its order, in coordinates of the tensor."""
    shape = tuple(stop - start for start, stop in piece.box)
    begin = index * FRAME
    end = min(begin + FRAME, layout.size(piece.box))
    return [
        tuple((start + a, start + b) for (start, _), (a, b) in zip(piece.box, box, strict=True))
        for box in layout.run(shape, begin, end)
    ]


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
