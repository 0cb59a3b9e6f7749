"""What a trainer hands to the publisher, as bits in the wire dtype: the border to torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose.transfer import layout
from rose.transfer.delta import Bits
from rose.transfer.layout import FRAME, Piece
from rose.transfer.manifest import WIDTHS, Tensor

SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Held:
    """A piece of a tensor that this rank holds."""

    tensor: Tensor
    piece: Piece
    local: torch.Tensor
    """Flat, row by row, in the trainer's dtype."""

    def frame(self, index: int) -> Bits:
        """One frame in the wire dtype: converted one by one, so that no second model is made."""
        part = self.local[index * FRAME : (index + 1) * FRAME]
        part = part.to(getattr(torch, self.tensor.dtype)).cpu()
        plain: Bits = part.view(SIGNED[part.element_size()]).numpy()
        return plain.view(np.dtype(f"u{plain.itemsize}"))


def held(weights: Any, wire: str) -> Iterator[Held]:
    """`weights`: a module, a state dict, or pairs of name and tensor; of DTensors the own part."""
    for name, value in _pairs(weights):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
        local, box = _local(value.detach())
        tensor = Tensor(name, _on_the_wire(name, local.dtype, wire), tuple(value.shape))
        if local.numel():
            yield Held(tensor, Piece(name, box), local.contiguous().reshape(-1))


def _pairs(weights: Any) -> Iterable[tuple[str, Any]]:
    pairs: Iterable[tuple[str, Any]] = weights
    if isinstance(weights, torch.nn.Module):
        pairs = weights.named_parameters()  # tied ones once
    elif isinstance(weights, Mapping):
        pairs = weights.items()
    return pairs


def _local(value: torch.Tensor) -> tuple[torch.Tensor, layout.Box]:
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return value, layout.whole(tuple(value.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return value.to_local(), tuple((o, o + n) for o, n in zip(offset, shape, strict=True))


def _on_the_wire(name: str, dtype: torch.dtype, wire: str) -> str:
    """Wider floats become the wire dtype; what is as narrow, or no float, goes as it is."""
    own = str(dtype).removeprefix("torch.")
    if own not in WIDTHS:
        raise TypeError(f"{name} is of {own}, which cannot be sent")
    return wire if dtype.is_floating_point and WIDTHS[own] > WIDTHS[wire] else own
