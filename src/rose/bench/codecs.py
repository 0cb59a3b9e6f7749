"""Four ways to send what changed between two versions of bf16 weights, all of them bit-exact.

    dense       the new bytes
    coo         int32 places and new values (vLLM's sparse engine)
    xor_zstd    old XOR new as a whole, through zstd (slime, SkyRL)
    rose        `delta.diff`, packed and compressed as the publisher does

All get the weights in pieces of `FRAME` elements, as if each were a tensor: what a codec makes on
the way then stays in the cache, which is kindest to those that make most of it. Payloads are fresh
memory, as in a real sender, so that encoding is slower than a copy into prepared memory even where
it is nothing else. No codec computes checksums here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import zstandard

from rose.transfer import delta, frame
from rose.transfer.delta import Bits
from rose.transfer.layout import FRAME

DENSITIES = (0.001, 0.01, 0.03, 0.1, 1.0)
ELEMENTS = 64 * FRAME
"""67 MB of bf16: more than a cache holds."""
REPEATS = 7
SIGMA = 0.02
"""Spread of the made-up weights, as in a model of some billion parameters."""


@dataclass(frozen=True)
class Codec:
    """`code` makes buffers of one frame's difference, `put` applies them to one frame."""

    code: Callable[[Bits, Bits], Any]
    put: Callable[[Bits, Any], None]

    def encode(self, old: Bits, new: Bits) -> list[Any]:
        return [self.code(*pair) for pair in zip(_frames(old), _frames(new), strict=True)]

    def apply(self, weights: Bits, payload: list[Any]) -> None:
        for part, coded in zip(_frames(weights), payload, strict=True):
            self.put(part, coded)


def wire_bytes(payload: list[Any]) -> int:
    return sum(memoryview(buffer).nbytes for coded in payload for buffer in coded)


def _frames(bits: Bits) -> list[Bits]:
    return [bits[begin : begin + FRAME] for begin in range(0, bits.size, FRAME)]


def _code_dense(old: Bits, new: Bits) -> tuple[bytes]:
    return (new.tobytes(),)


def _put_dense(weights: Bits, coded: tuple[bytes]) -> None:
    weights[:] = np.frombuffer(coded[0], weights.dtype)


def _code_coo(old: Bits, new: Bits) -> tuple[Bits, Bits]:
    where = np.flatnonzero(old != new)
    return where.astype(np.int32), new.take(where)


def _put_coo(weights: Bits, coded: tuple[Bits, Bits]) -> None:
    where, values = coded
    weights[where] = values


def _code_xor(old: Bits, new: Bits) -> tuple[bytes]:
    return (zstandard.ZstdCompressor(level=frame.LEVEL).compress((old ^ new).data),)


def _put_xor(weights: Bits, coded: tuple[bytes]) -> None:
    weights ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(coded[0]), weights.dtype)


def _code_rose(old: Bits, new: Bits) -> tuple[bytes]:
    return (frame.pack(delta.diff(old, new), compress=True),)


def _put_rose(weights: Bits, coded: tuple[bytes]) -> None:
    delta.patch(weights, frame.unpack(coded[0]))


CODECS = {
    "dense": Codec(_code_dense, _put_dense),
    "coo": Codec(_code_coo, _put_coo),
    "xor_zstd": Codec(_code_xor, _put_xor),
    "rose": Codec(_code_rose, _put_rose),
}
UNPACKED = Codec(delta.diff, delta.patch)
"""rose without packing to bytes: not for the wire, timed to see what the codec itself costs."""


def versions(density: float, elements: int, seed: int) -> tuple[Bits, Bits]:
    """Two versions of bf16 weights: that share of elements, anywhere, is one bf16 step apart."""
    rng = np.random.default_rng(seed)
    wide = (rng.standard_normal(elements, np.float32) * np.float32(SIGMA)).view(np.uint32)
    old = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    where = rng.choice(elements, round(density * elements), replace=False, shuffle=False)
    new = old.copy()
    new[where] += rng.choice(np.array([1, 0xFFFF], np.uint16), where.size)
    return old, new


def measure(
    density: float,
    elements: int = ELEMENTS,
    repeats: int = REPEATS,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All codecs on the same two versions, one thread, alternating in every repeat.

    `X_vs_memcpy` is the median time of a copy of the dense bytes over the median time of X, and
    `X_vs_memcpy_spread` the lowest and highest such ratio inside one repeat.
    """
    old, new = versions(density, elements, seed)
    weights = np.empty_like(old)
    memcpy: list[float] = []
    encode, apply = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    exact, size = dict.fromkeys(CODECS, True), dict.fromkeys(CODECS, 0)
    for repeat in range(-1, repeats):
        if repeat == 0:  # the round before compiled and warmed up
            for times in (memcpy, *encode.values(), *apply.values()):
                times.clear()
        memcpy.append(_timed(np.copyto, weights, new)[0])
        for name, codec in (CODECS | {"unpacked": UNPACKED}).items():
            took, payload = _timed(codec.encode, old, new)
            encode[name].append(took)
            np.copyto(weights, old)
            apply[name].append(_timed(codec.apply, weights, payload)[0])
            if name in CODECS:
                exact[name] &= np.array_equal(weights, new)
                size[name] = wire_bytes(payload)
    codecs: dict[str, dict[str, Any]] = {
        name: {
            "wire_percent": 100 * size[name] / new.nbytes,
            **_ratio("encode_vs_memcpy", memcpy, encode[name]),
            **_ratio("apply_vs_memcpy", memcpy, apply[name]),
            "bit_exact": exact[name],
        }
        for name in CODECS
    }
    codecs["rose"] |= _ratio("encode_vs_memcpy_codec", memcpy, encode["unpacked"])
    codecs["rose"] |= _ratio("apply_vs_memcpy_codec", memcpy, apply["unpacked"])
    for name, row in codecs.items():
        say(
            f"{density:.1%} changed, {name}: {row['wire_percent']:.2f} % on the wire, memcpy "
            f"x {row['encode_vs_memcpy']:.3g} to encode, x {row['apply_vs_memcpy']:.3g} to apply"
        )
    return {
        "density": density,
        "elements": elements,
        "repeats": repeats,
        "memcpy_gb_s": new.nbytes / median(memcpy) / 1e9,
        "codecs": codecs,
    }


def _timed(work: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - began, result


def _ratio(key: str, base: Sequence[float], times: Sequence[float]) -> dict[str, Any]:
    single = [one / other for one, other in zip(base, times, strict=True)]
    return {key: median(base) / median(times), f"{key}_spread": [min(single), max(single)]}
