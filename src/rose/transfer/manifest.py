"""What a published step contains: which tensors, which pieces of them, and where their frames are.

A *step* leads from a base version to a new one (a delta), or from nothing (an anchor; its frames
are differences to zeros). Each publishing rank writes its own part of a step: buckets of frames,
then, last, its manifest. A step exists once the manifests of all its ranks do.

On disk and on the wire a manifest is magic, msgpack, and xxh3-128 of both. Everything in it is
checked before it is used: it comes from another cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from rose.transfer.layout import FRAME, Box, Piece, Shape, size

MAGIC = b"ROSEMAN1"
DIGEST = 16
"""Bytes of an xxh3-128."""
MOST_RANKS = 1 << 16
MOST_ELEMENTS = 1 << 40
"""Of one tensor: receivers make room for all of it before anything of it has come."""
VERSIONS = 10**10
"""Versions have ten digits: in names of folders they sort by themselves."""
JOB = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
"""Names of jobs become names of folders."""
WIDTHS = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
"""Bytes per element of every dtype that may be sent, by torch's names."""
FRAMES = np.dtype([("bucket", "<u4"), ("offset", "<u4"), ("length", "<u4"), ("digest", "S16")])


class ManifestError(ValueError):
    """Bytes that are no manifest, or a manifest that cannot be true."""


class Step(NamedTuple):
    """An edge of a job's history."""

    base: int | None
    version: int


class Tensor(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Part(msgspec.Struct, frozen=True):
    """A piece of one tensor and where its frames begin in the table."""

    tensor: int
    box: Box
    first: int


class Bucket(msgspec.Struct, frozen=True):
    size: int
    digest: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    version: int
    base: int | None
    rank: int
    ranks: int
    tensors: list[Tensor]
    parts: list[Part]
    buckets: list[Bucket]
    frames: bytes
    """`FRAMES` records: where each frame is, and xxh3-128 of the elements that result from it."""
    changed: int
    """Elements sent."""

    @property
    def step(self) -> Step:
        return Step(self.base, self.version)

    @property
    def stored(self) -> int:
        return sum(bucket.size for bucket in self.buckets)

    @property
    def elements(self) -> int:
        return sum(size(part.box) for part in self.parts)

    def table(self) -> np.ndarray:
        return np.frombuffer(self.frames, FRAMES)

    def piece(self, part: Part) -> Piece:
        return Piece(self.tensors[part.tensor].name, part.box)


def digest(data: Any) -> bytes:
    """xxh3-128 of anything with a buffer."""
    return xxhash.xxh3_128_digest(data)


def encode(manifest: Manifest) -> bytes:
    body = MAGIC + msgspec.msgpack.encode(manifest)
    return body + digest(body)


def decode(data: bytes) -> Manifest:
    body, said = data[:-DIGEST], data[-DIGEST:]
    if not data.startswith(MAGIC) or digest(body) != said:
        raise ManifestError("not a manifest, or a damaged one")
    try:
        manifest = msgspec.msgpack.decode(body[len(MAGIC) :], type=Manifest)
    except msgspec.DecodeError as error:
        raise ManifestError(f"not a manifest: {error}") from error
    _check(manifest)
    return manifest


def check_job(job: str) -> str:
    if not JOB.fullmatch(job):
        raise ValueError(f"job {job!r}: letters, digits, '.', '_' and '-', not starting with '.'")
    return job


def _check(m: Manifest) -> None:
    """Raise unless every number in it can be true."""
    for what in _untrue(m):
        raise ManifestError(f"version {m.version} of job {m.job!r}: {what}")


def _untrue(m: Manifest) -> Iterator[str]:
    if JOB.fullmatch(m.job) is None:
        yield "impossible name of a job"
    if not 0 <= m.version < VERSIONS:
        yield "impossible number of a version"
    if m.base is not None and not 0 <= m.base < m.version:
        yield f"base {m.base}"
    if not 0 <= m.rank < m.ranks <= MOST_RANKS:
        yield f"rank {m.rank} of {m.ranks}"
    if len({t.name for t in m.tensors}) != len(m.tensors):
        yield "a tensor listed twice"
    for tensor in m.tensors:
        if tensor.dtype not in WIDTHS:
            yield f"{tensor.name} has unknown dtype {tensor.dtype!r}"
        if not (all(n > 0 for n in tensor.shape) and tensor.elements <= MOST_ELEMENTS):
            yield f"{tensor.name} has shape {tensor.shape}"
    if len(m.frames) % FRAMES.itemsize:
        yield "a torn table of frames"
    expected = 0
    for part in m.parts:
        if not 0 <= part.tensor < len(m.tensors):
            yield f"a piece of tensor {part.tensor}"
        tensor = m.tensors[part.tensor]
        if len(part.box) != len(tensor.shape) or not all(
            0 <= start < stop <= extent
            for (start, stop), extent in zip(part.box, tensor.shape, strict=True)
        ):
            yield f"{part.box} is not in {tensor.name}, which is {tensor.shape}"
        if part.first != expected:
            yield f"frames of {tensor.name} begin at {part.first}"
        expected += -(-size(part.box) // FRAME)
    table = m.table()
    if len(table) != expected:
        yield f"{len(table)} frames instead of {expected}"
    sizes = np.array([bucket.size for bucket in m.buckets] or [0], np.int64)
    if not ((sizes >= 0).all() and (table["bucket"] < max(1, len(m.buckets))).all()):
        yield "a bucket"
    ends = table["offset"].astype(np.int64) + table["length"]
    if not (ends <= sizes[table["bucket"]]).all():
        yield "a frame past the end of its bucket"
