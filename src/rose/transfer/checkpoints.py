"""How two checkpoints in safetensors differ, and what sending the difference would cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from rose.transfer import frame
from rose.transfer.delta import diff
from rose.transfer.inspect import Read, TensorFacts
from rose.transfer.layout import Shape
from rose.transfer.manifest import WIDTHS
from rose.transfer.weights import Held, held

LINK = 125_000_000
"""Bytes per second of 1 Gb/s, for which times are told."""
NAMED = 5
"""Tensors that cannot be compared are named up to here: of two different models none can."""


class Checkpoint:
    """The tensors of a safetensors file, or of all those in a folder, one at a time."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"{path} has no .safetensors file")
        self._files: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file}: {error}") from error
            self._files |= dict.fromkeys(opened.keys(), opened)

    def shapes(self) -> dict[str, Shape]:
        return {n: tuple(file.get_slice(n).get_shape()) for n, file in self._files.items()}

    def load(self, name: str, wire: str) -> Iterator[Held]:
        """One tensor as it would be sent; none if it is empty."""
        return held([(name, self._files[name].get_tensor(name))], wire)


def compare(old: Checkpoint, new: Checkpoint, wire: str, read: Read) -> Iterator[TensorFacts]:
    """Bit for bit in the wire dtype, coded as a publisher would; `read` is told of elements."""
    shapes = new.shapes()
    if other := _unlike(old.shapes(), shapes):
        more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
        raise ValueError(f"OLD and NEW have different tensors: {'; '.join(other[:NAMED])}{more}")
    for name in sorted(shapes):
        for before, after in zip(old.load(name, wire), new.load(name, wire), strict=True):
            yield _compare(before, after)
        read(math.prod(shapes[name]))


def _unlike(old: Mapping[str, Shape], new: Mapping[str, Shape]) -> list[str]:
    return [
        *(f"{name} is only in OLD" for name in sorted(old.keys() - new.keys())),
        *(f"{name} is only in NEW" for name in sorted(new.keys() - old.keys())),
        *(
            f"{name} is {old[name]} in OLD and {new[name]} in NEW"
            for name in sorted(old.keys() & new.keys())
            if old[name] != new[name]
        ),
    ]


def _compare(old: Held, new: Held) -> TensorFacts:
    if (was := old.tensor.dtype) != (now := new.tensor.dtype):
        raise ValueError(f"{new.tensor.name} would be sent as {was} of OLD and as {now} of NEW")
    changed = sent = 0
    for index in range(new.piece.frames):
        before, after = old.frame(index), new.frame(index)
        if count := int(np.count_nonzero(before != after)):
            changed += count
            sent += len(frame.pack(diff(before, after), compress=True))
    return TensorFacts.of(new.tensor, changed, sent)


@dataclass(frozen=True)
class Total:
    """Of all tensors of two checkpoints."""

    elements: int
    changed: int
    density: float
    bytes_dense: int
    """Of all elements in the wire dtype."""
    bytes_sent: int
    ratio: float | None
    """Dense to sent; None when nothing is sent."""
    seconds_dense: float
    """On a link of 1 Gb/s."""
    seconds_sent: float

    @classmethod
    def of(cls, tensors: Sequence[TensorFacts]) -> Total:
        elements = sum(one.elements for one in tensors)
        changed = sum(one.changed for one in tensors)
        dense = sum(one.elements * WIDTHS[one.dtype] for one in tensors)
        sent = sum(one.bytes for one in tensors)
        return cls(
            elements,
            changed,
            changed / max(1, elements),
            dense,
            sent,
            dense / sent if sent else None,
            dense / LINK,
            sent / LINK,
        )

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f": ratio {self.ratio:.1f}"
        return (
            f"{self.changed:,} of {self.elements:,} elements changed: {self.density:.4%}\n"
            f"{self.bytes_sent:,} bytes instead of {self.bytes_dense:,}{ratio}\n"
            f"at 1 Gb/s {self.seconds_sent:.3f} s instead of {self.seconds_dense:.3f} s"
        )
