"""Every codec gives back the new version bit for bit; sizes are what the formats say."""

from __future__ import annotations

import numpy as np
import pytest

from rose.bench.codecs import CODECS, UNPACKED, Codec, measure, versions, wire_bytes
from rose.transfer.delta import Bits
from rose.transfer.layout import FRAME

ODD = np.array([[0x0000, 0x8000], [0x7FC0, 0x7FC1], [0x7F80, 0xFF81], [0x8000, 0xFFFF]], np.uint16)
"""Old and new bits: 0.0 and -0.0, NaNs with other payloads, infinity and a NaN."""
SIZES = (0, 1, 4, 1000, FRAME, 2 * FRAME + 12_345)
ALL = CODECS | {"unpacked": UNPACKED}
RATIOS = ("encode_vs_memcpy", "apply_vs_memcpy")


def pair(density: float, elements: int) -> tuple[Bits, Bits]:
    """Versions whose first changes are the odd ones."""
    old, new = versions(density, elements, seed=3)
    where = np.flatnonzero(old != new)[: len(ODD)]
    old[where], new[where] = ODD[: where.size].T
    return old, new


@pytest.mark.parametrize("codec", ALL.values(), ids=ALL)
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_round_trip(codec: Codec, elements: int, density: float) -> None:
    old, new = pair(density, elements)
    before = old.copy(), new.copy()
    payload = codec.encode(old, new)
    weights = old.copy()
    codec.apply(weights, payload)
    assert np.array_equal(weights, new)
    assert np.array_equal(old, before[0]) and np.array_equal(new, before[1])


@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
def test_versions_are_one_step_apart_where_they_differ(density: float) -> None:
    old, new = versions(density, 100_000, seed=1)
    apart = (new - old).view(np.int16)
    assert np.count_nonzero(apart) == density * 100_000
    assert set(np.unique(np.abs(apart))) <= {0, 1}
    if density == 1.0:
        assert abs(apart.mean()) < 0.02
    values = (old.astype(np.uint32) << 16).view(np.float32)
    assert 0.0199 < values.std() < 0.0201 and abs(values.mean()) < 0.0005


def test_sizes_at_one_percent() -> None:
    elements = 2 * FRAME
    old, new = versions(0.01, elements, seed=0)
    size = {name: wire_bytes(codec.encode(old, new)) for name, codec in CODECS.items()}
    assert size["dense"] == 2 * elements
    assert size["coo"] == 6 * round(0.01 * elements)
    assert size["rose"] < size["coo"] < size["dense"]
    assert size["xor_zstd"] < size["coo"]


def test_nothing_changed_is_nearly_free() -> None:
    old, _ = versions(0.0, FRAME, seed=0)
    for name in ("coo", "xor_zstd", "rose"):
        assert wire_bytes(CODECS[name].encode(old, old)) < 100


def test_measure_tells_all() -> None:
    said: list[str] = []
    found = measure(0.01, elements=FRAME + 7, repeats=2, seed=0, say=said.append)
    assert found["density"] == 0.01 and found["elements"] == FRAME + 7 and found["repeats"] == 2
    assert found["memcpy_gb_s"] > 0
    assert list(found["codecs"]) == list(CODECS)
    for name, row in found["codecs"].items():
        ratios = [*RATIOS, *(f"{key}_codec" for key in RATIOS if name == "rose")]
        spreads = [f"{key}_spread" for key in ratios]
        assert set(row) == {"wire_percent", "bit_exact", *ratios, *spreads}
        assert row["bit_exact"] is True
        assert all(row[key] > 0 for key in ratios)
        assert all(low <= high for low, high in (row[key] for key in spreads))
        assert any(name in line for line in said)
    assert found["codecs"]["dense"]["wire_percent"] == 100
