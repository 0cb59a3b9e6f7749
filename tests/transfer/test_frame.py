"""Frames as bytes: there and back, and nothing that is no frame gets through."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfer.test_delta import DENSITIES, pair, same

from rose.transfer import frame
from rose.transfer.delta import UNSIGNED, FrameError, diff, patch
from rose.transfer.layout import CHUNK, FRAME


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("width", UNSIGNED)
def test_there_and_back(width: int, compress: bool) -> None:
    for size in (0, 1, 1000, CHUNK + 7):
        for density in DENSITIES:
            old, new = pair(width, size, density)
            changes = diff(old, new)
            data = frame.pack(changes, compress=compress)
            assert same(frame.unpack(data), changes)
            assert len(data) <= frame.HEADER.size + 10 + new.nbytes


def weights(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits of normal numbers, 1 % of them moved by one unit in the last place."""
    rng = np.random.default_rng(seed)
    old = (rng.normal(0, 0.02, FRAME).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    moved = rng.random(FRAME) < 0.01
    return old, old + (rng.choice([-1, 1], FRAME) * moved).astype(np.int16).view(np.uint16)


def test_one_percent_of_real_looking_weights_costs_less_than_1_3_percent() -> None:
    old, new = weights()
    assert len(frame.pack(diff(old, new), compress=True)) < 0.013 * new.nbytes


GOOD = frame.pack(diff(*(version[: CHUNK + 9] for version in weights())), compress=True)
VALUES_AT = frame.HEADER.size + 5 * 2 + struct.unpack_from("<I", GOOD, 12)[0]


def changed(offset: int, form: str, value: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"", "shorter than its header"),
        (GOOD[:20], "shorter than its header"),
        (changed(0, "<I", 1), "wrong magic"),
        (changed(5, "<B", 1), "wrong magic"),
        (changed(4, "<B", 3), "elements of 3 bytes"),
        (changed(6, "<H", 9), "in 9 chunks"),
        (changed(8, "<I", 2**32 - 1), "4294967295 elements"),
        (changed(8, "<I", 5), "5 elements in 2 chunks"),
        (changed(16, "<I", 2**31), "bytes of gaps"),
        (changed(24, "<I", 2**31), "bytes of gaps"),
        (changed(12, "<I", 60_000), "more bytes than it has"),
        (GOOD[:-1], "instead of what its header says"),
        (GOOD + b"x", "instead of what its header says"),
        (changed(VALUES_AT, "<I", 0), "decompress"),
    ],
)
def test_what_is_no_frame_is_refused(bad: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        patch(np.zeros(CHUNK + 9, np.uint16), frame.unpack(bad))


def test_a_short_list_that_unpacks_to_gigabytes_is_refused() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26))
    header = frame.HEADER.pack(frame.MAGIC, 2, 0, 1, CHUNK, 0, 0, len(bomb), CHUNK * 2)
    with pytest.raises(FrameError, match="decompress"):
        frame.unpack(header + bytes([2]) + struct.pack("<I", CHUNK) + bomb)


@settings(max_examples=400)
@given(st.data())
def test_flipped_bytes_never_crash_nor_write_outside(data: st.DataObject) -> None:
    broken = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 60), st.integers(0, len(GOOD) - 1)))
        broken[at] = data.draw(st.integers(0, 255))
    guarded = np.full(CHUNK + 9 + 200, 1, np.uint16)
    try:
        patch(guarded[100:-100], frame.unpack(bytes(broken)))
    except FrameError:
        assert (guarded == 1).all()
    assert (guarded[:100] == 1).all() and (guarded[-100:] == 1).all()


@given(st.binary(max_size=200))
def test_noise_is_no_frame(noise: bytes) -> None:
    with pytest.raises(FrameError):
        frame.unpack(frame.MAGIC + noise)
