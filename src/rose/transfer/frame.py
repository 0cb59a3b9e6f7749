"""A frame as bytes: a header, what each chunk is, gaps and values; both lists zstd if that helps.

    0   4s      magic
    4   u8      bytes per element: 1, 2, 4 or 8
    5   u8      0
    6   u16     chunks
    8   u32     elements
    12  u32 x 2 gaps: bytes stored, bytes
    20  u32 x 2 values: bytes stored, bytes
    28  u8      kind of each chunk
    ..  u32     count of each chunk
    ..          gaps, then values

Little endian. A list that is stored in fewer bytes than it has is compressed. Nothing in a frame is
believed before it is checked: lengths before anything of that length is made, what the chunks say
before it is applied (`delta.check`).
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import zstandard

from rose.transfer.delta import UNSIGNED, Bits, Changes, FrameError
from rose.transfer.layout import CHUNK, FRAME

MAGIC = b"RFR1"
HEADER = struct.Struct("<4sBBHIIIII")
LEVEL = 1
"""zstd's fastest level: higher ones gain a few percent of a percent and cost several times more."""


class _Own(threading.local):
    """A thread's own: making them takes longer than using them."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False)
        self.decompressor = zstandard.ZstdDecompressor()


_own = _Own()


def pack(changes: Changes, *, compress: bool) -> bytes:
    values = changes.values
    gaps_raw = changes.gaps.tobytes()
    values_raw = values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
    gaps_kept, values_kept = _squeeze(gaps_raw, compress), _squeeze(values_raw, compress)
    header = HEADER.pack(
        MAGIC,
        values.itemsize,
        0,
        changes.kinds.size,
        changes.elements,
        len(gaps_kept),
        len(gaps_raw),
        len(values_kept),
        len(values_raw),
    )
    kinds, counts = changes.kinds.tobytes(), changes.counts.astype("<u4").tobytes()
    return b"".join((header, kinds, counts, gaps_kept, values_kept))


def unpack(data: bytes | memoryview) -> Changes:
    """Raises `FrameError` if the bytes are no frame. Its chunks are checked when it is applied."""
    data = memoryview(data)
    if len(data) < HEADER.size:
        raise FrameError(f"a frame of {len(data)} bytes is shorter than its header")
    magic, width, zero, chunks, elements, *lengths = HEADER.unpack_from(data)
    gaps_kept, gaps_raw, values_kept, values_raw = lengths
    if magic != MAGIC or zero:
        raise FrameError("not a frame: wrong magic")
    if width not in UNSIGNED:
        raise FrameError(f"elements of {width} bytes")
    if elements > FRAME or chunks != -(-elements // CHUNK):
        raise FrameError(f"{elements} elements in {chunks} chunks")
    if gaps_raw > elements or values_raw > elements * width or values_raw % width:
        raise FrameError(f"{gaps_raw} bytes of gaps and {values_raw} of values")
    if gaps_kept > gaps_raw or values_kept > values_raw:
        raise FrameError("a list stored in more bytes than it has")
    if len(data) != HEADER.size + 5 * chunks + gaps_kept + values_kept:
        raise FrameError(f"{len(data)} bytes instead of what its header says")
    at = HEADER.size
    kinds = np.frombuffer(data, np.uint8, chunks, at)
    counts = np.frombuffer(data, "<u4", chunks, at + chunks).astype(np.uint32)
    at += 5 * chunks
    gaps = _stretch(data[at : at + gaps_kept], gaps_raw)
    values = _stretch(data[at + gaps_kept :], values_raw)
    return Changes(
        elements,
        kinds,
        counts,
        np.frombuffer(gaps, np.uint8),
        _native(np.frombuffer(values, np.dtype(UNSIGNED[width]).newbyteorder("<"))),
    )


def _native(values: np.ndarray[Any, Any]) -> Bits:
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _squeeze(raw: bytes, compress: bool) -> bytes:
    if not compress or not raw:
        return raw
    smaller = _own.compressor.compress(raw)
    return smaller if len(smaller) < len(raw) else raw


def _stretch(kept: memoryview, raw: int) -> bytes | memoryview:
    if len(kept) == raw:
        return kept
    try:
        whole = _own.decompressor.decompress(
            kept, max_output_size=raw, read_across_frames=False, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FrameError(f"a list that cannot be decompressed: {error}") from error
    if len(whole) != raw:
        raise FrameError(f"a list of {len(whole)} bytes instead of {raw}")
    return whole
