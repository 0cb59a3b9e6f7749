"""How long a new version of the weights takes from the trainer into every engine.

    control + encode + transfer + apply + pause

The trainer's ranks compare their slices with the last version (`encode`). One copy per cluster
crosses the WAN to a relay, from which every engine pulls it once, each of its ranks the slices that
it holds. The relay passes on what has arrived: WAN and fan-out overlap bucket by bucket, and take
as long as the slower one and the first bucket of the other. Encoding and applying do not overlap
with that: a version becomes visible when all of it is there, and is applied when all of it is
verified. Times measured on three links add up like this within a tenth (tests/plan/test_sync.py).

Sizes and speeds are from docs/benchmarks.md, "Results of the transfer", unless they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from rose.transfer.layout import CHUNK

BUCKET = 64 << 20
"""Bytes that are passed on at once, as `transfer.publisher` makes them; 64 MB in the paper too."""
COO_INDEX_BYTES = 4
"""An int32 place for every changed element."""
MOST_GAP = 255
"""A byte tells of up to that many unchanged elements (`transfer.delta`)."""
ZSTD_SHARES = ((0.001, 0.0019), (0.01, 0.0131), (0.03, 0.0358), (0.1, 0.108), (1.0, 0.78))
"""Share of bf16 elements changed, and share of the dense bytes sent, measured."""
ZSTD_BYTES_PER_S = 165e6
"""Of one core: 25 ms for the 4.1 MB of SmolLM2 with 1 % changed."""


class Codec(StrEnum):
    """What is sent of a version."""

    DENSE = "dense"
    COO = "coo"
    """A place and a value for every changed element: the paper's, and vLLM's sparse engine's."""
    ROSE = "rose"
    """Gaps of a byte and values; 1.54 % of the dense bytes at 1 % changed."""
    ROSE_ZSTD = "rose_zstd"
    """The same through zstd, for links below half a Gb/s; 1.31 % at 1 %."""


class Links(NamedTuple):
    wan_bytes_per_s: float
    """Out of the trainer's cluster, shared by all copies."""
    lan_bytes_per_s: float
    """Of a relay, or of a rank of an engine, inside a cluster."""


@dataclass(frozen=True)
class Speeds:
    """Of the processes at both ends."""

    compare_bytes_per_s: float
    """Dense bytes that one rank of the trainer compares and packs."""
    scatter_bytes_per_s: float
    """Bytes of changed elements that one rank of an engine takes in."""
    copy_bytes_per_s: float
    """Dense bytes that it takes in."""
    control_s: float = 0.07
    """Until the engine has the manifest (20 ms), its step has ended (30) and the client knows (20).
    Given for one machine; hardly its speed."""
    pause_s: float = 0.035
    """Generation stands still: 27 to 41 ms with 4 MB as with 269 MB."""


TWO_CORES = Speeds(3.6e9, 100e6, 105e6)
"""FITTED to the table of three links: SmolLM2, trainer, relay and a CPU engine (which computes in
float32 and packs its layers) on the same two cores."""
GPU_HOST = Speeds(6e9, 1.5e9, 25e9)
"""Comparing: 0.76 of a memcpy of 7 to 8.5 GB/s, `delta.diff` alone at 1 %. Scattering: FITTED to
the paper's "about 1 s": 3 % of Qwen3-8B, or of a quarter of Qwen3-32B, is 1.5 GB in COO. Copying:
PCIe Gen4 x16, 32 GB/s by its specification, at 0.8."""


class Sync(NamedTuple):
    """Seconds of one version. `transfer_s` is WAN and fan-out as they overlap."""

    encode_s: float
    wan_s: float
    fanout_s: float
    transfer_s: float
    apply_s: float
    pause_s: float
    total_s: float


def wire_bytes(elements: int, density: float, codec: Codec, dtype_bytes: int = 2) -> float:
    """Bytes of a version of which `density` of all elements changed, evenly spread.

    Never more than the dense ones: chunks that would be larger are sent dense.
    """
    if not 0 <= density <= 1:
        raise ValueError(f"density {density} is not a share from 0 to 1.")
    dense = float(elements * dtype_bytes)
    if codec is Codec.DENSE:
        return dense
    if density == 0:
        return 0.0
    if codec is Codec.ROSE_ZSTD:
        return dense * _compressed_share(density)
    index_bytes = COO_INDEX_BYTES if codec is Codec.COO else _gap_bytes(density)
    return min(dense, density * elements * (index_bytes + dtype_bytes))


def _gap_bytes(density: float) -> float:
    """Per change: one byte, and one more for each whole `MOST_GAP` without a change before it.

    They begin anew in every chunk, so there are never more of them than a chunk has.
    """
    if density == 1:
        return 1.0
    unchanged = MOST_GAP * math.log1p(-density)
    return 1.0 + min(math.exp(unchanged) / -math.expm1(unchanged), CHUNK / MOST_GAP)


def _compressed_share(density: float) -> float:
    """Between two measured densities by a power law; below the least in proportion."""
    least, share = ZSTD_SHARES[0]
    if density <= least:
        return share * density / least
    for (low, low_share), (high, high_share) in pairwise(ZSTD_SHARES):
        if density <= high:
            power = math.log(high_share / low_share) / math.log(high / low)
            return float(low_share * (density / low) ** power)
    raise AssertionError(density)


def pipelined(stages_s: Sequence[float], size: float) -> float:
    """Stages that hand on buckets: the slowest for all of them, the others for the first."""
    buckets = max(1, math.ceil(size / BUCKET))
    slowest = max(stages_s)
    return slowest + (sum(stages_s) - slowest) / buckets


def sync_seconds(
    elements: int,
    density: float,
    links: Links,
    *,
    codec: Codec = Codec.ROSE,
    engines: int = 1,
    tp: int = 1,
    clusters: int = 1,
    relays: int = 1,
    trainer_ranks: int = 1,
    speeds: Speeds = GPU_HOST,
    dtype_bytes: int = 2,
) -> Sync:
    """One version into `engines` engines of `tp` ranks in each of `clusters` clusters."""
    for name, count in (("engines", engines), ("tp", tp), ("clusters", clusters)):
        if count < 1:
            raise ValueError(f"{name} is {count}; at least 1 is needed.")
    if relays < 1 or trainer_ranks < 1 or min(links) <= 0:
        raise ValueError("A sync needs a relay, a trainer and links faster than 0 bytes/s.")
    size = wire_bytes(elements, density, codec, dtype_bytes)
    encode_s = elements * dtype_bytes / speeds.compare_bytes_per_s / trainer_ranks
    if codec is Codec.ROSE_ZSTD:
        plain = wire_bytes(elements, density, Codec.ROSE, dtype_bytes)
        encode_s += plain / ZSTD_BYTES_PER_S / trainer_ranks
    wan_s = size * clusters / links.wan_bytes_per_s
    fanout_s = size * max(engines / relays, 1 / tp) / links.lan_bytes_per_s
    transfer_s = pipelined((wan_s, fanout_s), size)
    dense = size >= elements * dtype_bytes
    taken_in = speeds.copy_bytes_per_s if dense else speeds.scatter_bytes_per_s
    apply_s = size / tp / taken_in
    total_s = speeds.control_s + encode_s + transfer_s + apply_s + speeds.pause_s
    return Sync(encode_s, wan_s, fanout_s, transfer_s, apply_s, speeds.pause_s, total_s)
