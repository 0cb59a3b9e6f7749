from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.plan.shapes import SHAPES
from rose.plan.sync import (
    BUCKET,
    TWO_CORES,
    Codec,
    Links,
    Sync,
    pipelined,
    sync_seconds,
    wire_bytes,
)

SMOLLM2 = 134_515_008
"""Elements; 269 MB in bf16."""
GBIT = 1e9 / 8
LOOPBACK = 2.5e9
"""Plain TCP within a host, bytes/s."""
PAPER = Links(200 * GBIT, 400 * GBIT)


def share(density: float, codec: Codec) -> float:
    return wire_bytes(1_000_000, density, codec) / 2_000_000


@pytest.mark.parametrize(
    ("density", "codec", "measured"),
    [
        (0.01, Codec.DENSE, 1.0),
        (0.01, Codec.COO, 0.03),
        (0.1, Codec.COO, 0.30),
        (0.01, Codec.ROSE, 0.0154),
        (0.001, Codec.ROSE_ZSTD, 0.0019),
        (0.01, Codec.ROSE_ZSTD, 0.0131),
        (0.0033, Codec.ROSE_ZSTD, 0.0048),
        (0.1, Codec.ROSE_ZSTD, 0.108),
        (1.0, Codec.ROSE_ZSTD, 0.78),
    ],
)
def test_sizes_are_those_measured(density: float, codec: Codec, measured: float) -> None:
    """docs/benchmarks.md, "Results of the transfer"; 0.33 % is a real RL step."""
    assert share(density, codec) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("codec", Codec)
@given(densities=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_more_changes_are_never_fewer_bytes(codec: Codec, densities: tuple[float, float]) -> None:
    less, more = sorted(densities)
    assert 0 <= share(less, codec) <= share(more, codec) * (1 + 1e-9) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("gbit", "rose_s", "dense_s"), [(0.2, 0.40, 13.7), (1.0, 0.25, 4.7), (10.0, 0.22, 3.1)]
)
def test_times_are_those_measured(gbit: float, rose_s: float, dense_s: float) -> None:
    links = Links(gbit * GBIT, LOOPBACK)

    def total(codec: Codec) -> float:
        return sync_seconds(SMOLLM2, 0.01, links, codec=codec, speeds=TWO_CORES).total_s

    assert total(Codec.ROSE) == pytest.approx(rose_s, rel=0.1)
    assert total(Codec.DENSE) == pytest.approx(dense_s, rel=0.1)
    assert total(Codec.DENSE) / total(Codec.ROSE) == pytest.approx(dense_s / rose_s, rel=0.25)


@pytest.mark.parametrize(("model", "tp", "engines"), [("Qwen3-8B", 1, 16), ("Qwen3-32B", 4, 16)])
def test_the_paper(model: str, tp: int, engines: int) -> None:
    """Sparse transfers 9 to 12 times shorter, about 1 s to apply."""

    def sync(codec: Codec) -> Sync:
        return sync_seconds(
            SHAPES[model].parameters, 0.03, PAPER, codec=codec, tp=tp, engines=engines
        )

    assert 9 < sync(Codec.DENSE).transfer_s / sync(Codec.COO).transfer_s < 12
    assert sync(Codec.COO).apply_s == pytest.approx(1.0, rel=0.25)
    assert sync(Codec.ROSE).total_s < sync(Codec.COO).total_s < sync(Codec.DENSE).total_s


def test_one_copy_crosses_the_wan_whoever_asks_behind_it() -> None:
    one, many = (
        sync_seconds(10**10, 0.01, Links(GBIT, 100 * GBIT), engines=engines) for engines in (1, 32)
    )
    assert many.wan_s == one.wan_s
    assert many.fanout_s == pytest.approx(32 * one.fanout_s)
    assert many.transfer_s == pytest.approx(one.wan_s, rel=0.1)
    both = sync_seconds(10**10, 0.01, Links(GBIT, 100 * GBIT), clusters=2)
    assert both.wan_s == pytest.approx(2 * one.wan_s)


def test_compression_pays_on_slow_links_only() -> None:
    def total(gbit: float, codec: Codec) -> float:
        links = Links(gbit * GBIT, LOOPBACK)
        return sync_seconds(SMOLLM2, 0.01, links, codec=codec, speeds=TWO_CORES).total_s

    assert total(0.1, Codec.ROSE_ZSTD) < total(0.1, Codec.ROSE)
    assert total(1.0, Codec.ROSE_ZSTD) > total(1.0, Codec.ROSE)


@given(
    st.lists(st.floats(0.001, 100), min_size=1, max_size=5),
    st.floats(1, 1e12),
)
def test_stages_overlap_but_for_the_first_bucket(stages: list[float], size: float) -> None:
    together = pipelined(stages, size)
    assert max(stages) <= together * (1 + 1e-9) <= sum(stages) * (1 + 1e-6)
    if size <= BUCKET:
        assert together == pytest.approx(sum(stages))


def test_faster_links_are_never_slower() -> None:
    totals = [
        sync_seconds(10**9, 0.02, Links(gbit * GBIT, gbit * GBIT), engines=8, tp=2).total_s
        for gbit in (1, 10, 100, 400)
    ]
    assert all(slow > fast for slow, fast in pairwise(totals))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"density 2 is not a share"):
        wire_bytes(10, 2, Codec.ROSE)
    with pytest.raises(ValueError, match="engines is 0; at least 1"):
        sync_seconds(10, 0.1, PAPER, engines=0)
    with pytest.raises(ValueError, match="links faster than 0"):
        sync_seconds(10, 0.1, Links(0, 1))
