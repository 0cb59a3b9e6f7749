"""Who holds which slice of the weights, and who has to send what to whom.

Coordinates are those of the checkpoint: a tensor's name, and a *box* of its indices. A rank of a
trainer or an engine keeps boxes in parameters of its own; a `Shard` says which box, and where. All
the ways to shard come down to that:

    replicated           the whole tensor
    row / column TP      a part of one dimension
    PP                   the tensors of some layers only
    FSDP                 a run of the flattened tensor: up to 2 n - 1 boxes of n dimensions
    fused qkv, gate-up   several boxes, one after the other in one parameter
    experts              boxes of the expert dimension, or tensors by themselves
    tied embeddings      one tensor under two names: an alias, sent once

`plan` decides who publishes what: every element once, by somebody who holds it, the replicas taking
turns. And it tells every engine rank which frames (`FRAME` elements of a published piece) it
has to fetch. Nobody sends or fetches a tensor of which it holds nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CHUNK = 65_536
"""Elements per chunk: some thousand changed ones at the usual density, and dense runs stay rare."""
FRAME = 8 * CHUNK
"""Elements per frame: what is fetched and verified as one. 1 MB of bf16, at 1 % about 15 kB: small
enough that an engine with half of a tensor fetches half of it, large enough to compress."""
Box = tuple[tuple[int, int], ...]
"""First and one past the last index, of every dimension. A scalar has none, and one element."""
Shape = tuple[int, ...]
Rank = int | str


class Shard(NamedTuple):
    """A box of a tensor that a rank holds: row by row in `local`, a parameter of its own, flat."""

    tensor: str
    box: Box
    local: str
    offset: int = 0


class Piece(NamedTuple):
    """A box of a tensor that one rank publishes, as frames of its elements in row order."""

    tensor: str
    box: Box

    @property
    def frames(self) -> int:
        return -(-size(self.box) // FRAME)


class Plan(NamedTuple):
    publish: dict[Rank, list[Piece]]
    fetch: dict[Rank, dict[Piece, list[int]]]
    """Per engine rank and piece: the numbers of the frames it needs something of."""


Layout = Mapping[Rank, Sequence[Shard]]


class LayoutError(ValueError):
    """The layouts do not fit the tensors, or each other."""


def size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def whole(shape: Shape) -> Box:
    return tuple((0, extent) for extent in shape)


def part(shape: Shape, dimension: int, rank: int, ranks: int) -> Box:
    """The box of one of `ranks` equal parts of a dimension."""
    extent = shape[dimension]
    if extent % ranks:
        raise LayoutError(f"{extent} cannot be cut into {ranks} equal parts")
    each = extent // ranks
    return (
        *whole(shape[:dimension]),
        (rank * each, (rank + 1) * each),
        *whole(shape[dimension + 1 :]),
    )


def run(shape: Shape, start: int, stop: int) -> list[Box]:
    """The boxes of elements `start` to `stop` of the flattened tensor, in order."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise LayoutError(f"elements {start} to {stop} are not in a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        return _in_row(shape, start // row, start % row, stop - start // row * row)
    boxes = _in_row(shape, first - 1, start - (first - 1) * row, row) if start < first * row else []
    if first < last:
        boxes.append(((first, last), *whole(shape[1:])))
    if last * row < stop:
        boxes += _in_row(shape, last, 0, stop - last * row)
    return boxes


def _in_row(shape: Shape, row: int, start: int, stop: int) -> list[Box]:
    return [((row, row + 1), *box) for box in run(shape[1:], start, stop)]


def flat(tensor: str, shape: Shape, start: int, stop: int, local: str, offset: int) -> list[Shard]:
    """What an FSDP rank holds: a run of the flattened tensor, in its flat parameter."""
    shards = []
    for box in run(shape, start, stop):
        shards.append(Shard(tensor, box, local, offset))
        offset += size(box)
    return shards


def fused(local: str, parts: Iterable[tuple[str, Box]]) -> list[Shard]:
    """Boxes one after the other in one parameter, as in qkv and gate-up projections."""
    shards, offset = [], 0
    for tensor, box in parts:
        shards.append(Shard(tensor, box, local, offset))
        offset += size(box)
    return shards


def intersection(one: Box, other: Box) -> Box | None:
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def difference(box: Box, hole: Box) -> list[Box]:
    """Boxes that cover `box` without `hole`, each element once."""
    inner = intersection(box, hole)
    if inner is None:
        return [box]
    rest = []
    for dimension, ((start, stop), (low, high)) in enumerate(zip(box, inner, strict=True)):
        before, after = inner[:dimension], box[dimension + 1 :]
        rest += [
            (*before, between, *after)
            for between in ((start, low), (high, stop))
            if between[0] < between[1]
        ]
    return rest


def plan(
    shapes: Mapping[str, Shape],
    source: Layout,
    target: Layout,
    aliases: Mapping[str, str] | None = None,
) -> Plan:
    """Who publishes and who fetches what. `aliases`: other names of tensors, as of tied ones."""
    names = dict(aliases or {})
    for side in (source, target):
        _check(shapes, side, names)
    publish = _publish(shapes, source, names)
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for mine in publish.values():
        for piece in mine:
            pieces[piece.tensor].append(piece)
    fetch: dict[Rank, dict[Piece, list[int]]] = {}
    for rank, shards in target.items():
        needed: dict[Piece, set[int]] = defaultdict(set)
        for shard in shards:
            missing = size(shard.box)
            for piece in pieces[names.get(shard.tensor, shard.tensor)]:
                if (both := intersection(shard.box, piece.box)) is not None:
                    missing -= size(both)
                    needed[piece].update(_frames(piece, both))
            if missing:
                raise LayoutError(f"nobody publishes all of {shard.tensor} that {rank} needs")
        fetch[rank] = {piece: sorted(frames) for piece, frames in needed.items()}
    return Plan(publish, fetch)


def wanted(piece: Piece, shards: Sequence[Shard] | None) -> list[int]:
    """The frames of a piece that hold something of the shards; all of them without shards."""
    if shards is None:
        return list(range(piece.frames))
    found: set[int] = set()
    for shard in shards:
        if shard.tensor == piece.tensor:
            both = intersection(shard.box, piece.box)
            found.update(_frames(piece, both) if both is not None else ())
    return sorted(found)


def _check(shapes: Mapping[str, Shape], layout: Layout, names: Mapping[str, str]) -> None:
    for rank, shards in layout.items():
        for shard in shards:
            shape = shapes.get(names.get(shard.tensor, shard.tensor))
            if shape is None:
                raise LayoutError(f"{rank} holds {shard.tensor}, which is not a known tensor")
            inside = len(shape) == len(shard.box) and all(
                0 <= start < stop <= extent
                for (start, stop), extent in zip(shard.box, shape, strict=True)
            )
            if not inside:
                raise LayoutError(f"{rank} holds {shard.box} of {shard.tensor}, which is {shape}")


def _publish(
    shapes: Mapping[str, Shape], source: Layout, names: Mapping[str, str]
) -> dict[Rank, list[Piece]]:
    """Every element once. Of several holders the one with the least to send so far gets it."""
    holders: dict[str, list[tuple[Box, Rank]]] = defaultdict(list)
    for rank, shards in source.items():
        for shard in shards:
            holders[names.get(shard.tensor, shard.tensor)].append((shard.box, rank))
    publish: dict[Rank, list[Piece]] = {rank: [] for rank in source}
    load: dict[Rank, int] = dict.fromkeys(source, 0)
    for tensor in shapes:
        taken: list[Box] = []
        left = holders[tensor]
        while left:
            box, rank = min(left, key=lambda one: (load[one[1]], one[0]))
            left.remove((box, rank))
            free = [box]
            for other in taken:
                free = [piece for one in free for piece in difference(one, other)]
            taken += free
            publish[rank] += [Piece(tensor, one) for one in free]
            load[rank] += sum(map(size, free))
    return publish


def _frames(piece: Piece, inner: Box) -> Iterable[int]:
    """Frames of a piece that hold elements of a box inside it."""
    shape = tuple(stop - start for start, stop in piece.box)
    local = tuple(
        (a - start, b - start) for (a, b), (start, _) in zip(inner, piece.box, strict=True)
    )
    return _reached(shape, local, 0)


def _reached(shape: Shape, box: Box, base: int) -> set[int]:
    """Frames between the first and the last element, less those that lie wholly between rows."""
    row = math.prod(shape[1:])
    first = base + sum(start * math.prod(shape[i + 1 :]) for i, (start, _) in enumerate(box))
    last = base + sum((stop - 1) * math.prod(shape[i + 1 :]) for i, (_, stop) in enumerate(box))
    if last // FRAME - first // FRAME <= 1 or row <= FRAME:
        return set(range(first // FRAME, last // FRAME + 1))
    frames: set[int] = set()
    for index in range(*box[0]):
        frames |= _reached(shape[1:], box[1:], base + index * row)
    return frames
