"""Diff and patch: exact for any bits, equal to their numpy twins, and safe against hostile ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.transfer.delta import (
    UNSIGNED,
    Bits,
    Changes,
    FrameError,
    Kind,
    bits,
    check,
    diff,
    diff_plainly,
    merge,
    patch,
    patch_plainly,
)
from rose.transfer.layout import CHUNK, FRAME

SIZES = (0, 1, 3, 31, 32, 33, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 17)
DENSITIES = (0.0, 1e-5, 0.001, 0.01, 0.3, 0.66, 0.67, 0.9, 1.0)


def pair(width: int, size: int, density: float, seed: int = 0) -> tuple[Bits, Bits]:
    """Two versions that differ in about that share of their elements."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size * width, np.uint8).view(UNSIGNED[width])
    change = (rng.random(size) < density).astype(old.dtype)
    return old, old ^ change


def same(one: Changes, other: Changes) -> bool:
    return one.elements == other.elements and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one[1:], other[1:], strict=True)
    )


@pytest.mark.parametrize("width", UNSIGNED)
@pytest.mark.parametrize("size", SIZES)
def test_exact_and_equal_to_the_plain_twin(width: int, size: int) -> None:
    for seed, density in enumerate(DENSITIES):
        old, new = pair(width, size, density, seed)
        changes = diff(old, new)
        assert same(changes, diff_plainly(old, new))
        for apply in (patch, patch_plainly):
            copy = old.copy()
            apply(copy, changes)
            assert np.array_equal(copy, new)
            apply(copy, changes)  # absolute values: twice does no harm
            assert np.array_equal(copy, new)


@given(st.data())
def test_exact_wherever_the_changes_are(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3 * CHUNK))
    where = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    width = data.draw(st.sampled_from(list(UNSIGNED)))
    old, _ = pair(width, size, 0.0)
    new = old.copy()
    new[where] ^= data.draw(st.integers(1, 255))
    changes = diff(old, new)
    assert same(changes, diff_plainly(old, new))
    assert changes.changed == len(set(where))
    patch(old, changes)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("width", UNSIGNED)
def test_merged_changes_do_what_both_do(width: int) -> None:
    for seed, density in enumerate(DENSITIES):
        for other in DENSITIES:
            old, middle = pair(width, CHUNK + 77, density, seed)
            same_as_now, then = pair(width, CHUNK + 77, other, seed + 100)
            new = np.where(same_as_now == then, middle, then)
            merged = merge([diff(old, middle), diff(middle, new)])
            check(merged, old.size, old.dtype)
            copy = old.copy()
            patch(copy, merged)
            assert np.array_equal(copy, new)


def test_no_chunk_costs_more_than_its_elements() -> None:
    for density in DENSITIES:
        old, new = pair(2, 2 * CHUNK, density)
        changes = diff(old, new)
        assert changes.gaps.nbytes + changes.values.nbytes <= new.nbytes
    assert set(diff(*pair(2, CHUNK, 0.0)).kinds) == {Kind.EMPTY}
    assert set(diff(*pair(2, CHUNK, 0.01)).kinds) == {Kind.SPARSE}
    assert set(diff(*pair(2, CHUNK, 0.9)).kinds) == {Kind.DENSE}


def test_one_percent_costs_about_one_and_a_half_percent() -> None:
    old, new = pair(2, 8 * CHUNK, 0.01)
    changes = diff(old, new)
    assert 0.014 < (changes.gaps.nbytes + changes.values.nbytes) / new.nbytes < 0.016


@pytest.mark.parametrize("start", range(9))
def test_views_that_begin_anywhere(start: int) -> None:
    old, new = pair(2, CHUNK + 100, 0.01)
    changes = diff(old[start:], new[start:])
    assert same(changes, diff_plainly(old[start:], new[start:]))
    patch(old[start:], changes)
    assert np.array_equal(old[start:], new[start:])


def test_numbers_that_compare_equal_but_differ_in_bits_are_changes() -> None:
    zero, nan = np.array([0.0], np.float32), np.array([np.nan], np.float32)
    payload = (nan.view(np.uint32) | 1).view(np.float32)
    assert diff(bits(zero), bits(-zero)).changed == 1
    assert diff(bits(nan), bits(payload)).changed == 1
    assert diff(bits(nan), bits(nan.copy())).changed == 0
    patched = bits(nan.copy())
    patch(patched, diff(bits(nan), bits(payload)))
    assert patched.tobytes() == payload.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "uint8", "bool"])
def test_bits_are_a_view_of_any_shape(dtype: str) -> None:
    array = np.zeros((3, 4, 5), dtype)
    flat = bits(array)
    flat[-1] = 1
    assert flat.shape == (60,)
    assert array[2, 3, 4]
    turned = bits(array.T)
    assert turned.shape == (60,)
    assert not np.shares_memory(turned, array)
    assert bits(np.array(7, dtype)).shape == (1,)


def test_elements_wider_than_a_word_are_refused() -> None:
    with pytest.raises(TypeError, match="16 bytes"):
        bits(np.zeros(3, np.complex128))


def test_versions_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot compare"):
        diff(np.zeros(3, np.uint16), np.zeros(4, np.uint16))
    with pytest.raises(ValueError, match="cannot compare"):
        diff(np.zeros(3, np.uint16), np.zeros(3, np.uint32))
    with pytest.raises(ValueError, match="at most"):
        diff(np.zeros(FRAME + 1, np.uint8), np.zeros(FRAME + 1, np.uint8))


# ---- hostile changes

BASE = pair(2, CHUNK + 500, 0.0)[0]


def changes(
    kinds: Any = (1, 0), counts: Any = (2, 0), gaps: Any = (0, 5), values: Any = (7, 8), n: int = 0
) -> Changes:
    return Changes(
        n or BASE.size,
        np.array(kinds, np.uint8),
        np.array(counts, np.uint32),
        np.array(gaps, np.uint8),
        np.array(values, np.uint16),
    )


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (changes(n=7), "7 elements"),
        (changes(kinds=(1,), counts=(2,)), "1 chunks instead of 2"),
        (changes(kinds=(3, 0)), "unknown kind"),
        (changes(kinds=(0, 0)), "wrong count"),
        (changes(counts=(0, 0)), "wrong count"),
        (changes(counts=(CHUNK + 1, 0)), "wrong count"),
        (changes(kinds=(0, 2), counts=(0, 499), gaps=(), values=[1] * 499), "wrong count"),
        (changes(kinds=(0, 1), counts=(0, 2), gaps=(255, 240, 4)), "past the end"),
        (changes(gaps=[255] * 300), "past the end|fewer gaps"),
        (changes(gaps=(0,)), "fewer gaps"),
        (changes(gaps=(255, 255)), "fewer gaps"),
        (changes(gaps=(0, 5, 1)), "more gaps"),
        (changes(values=(7,)), "number of values"),
        (changes(values=(7, 8, 9)), "number of values"),
    ],
)
def test_bad_changes_are_refused_and_change_nothing(bad: Changes, said: str) -> None:
    weights = BASE.copy()
    with pytest.raises(FrameError, match=said):
        patch(weights, bad)
    assert np.array_equal(weights, BASE)


def test_values_of_another_width_are_refused() -> None:
    with pytest.raises(FrameError, match="uint32"):
        patch(BASE.copy(), changes()._replace(values=np.array([7, 8], np.uint32)))


small = st.integers(0, 300)


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
    st.lists(st.integers(0, 600), min_size=2, max_size=2),
    st.lists(st.sampled_from([0, 1, 100, 254, 255]), max_size=300),
    st.integers(0, 700),
)
def test_what_is_accepted_stays_inside(
    kinds: list[int], counts: list[int], gaps: list[int], values: int
) -> None:
    guarded = np.full(BASE.size + 2 * CHUNK, 1, np.uint16)
    weights = guarded[CHUNK : CHUNK + BASE.size]
    hostile = changes(kinds, counts, gaps, [2] * values)
    try:
        check(hostile, weights.size, weights.dtype)
    except FrameError:
        return
    patch(weights, hostile)
    assert set(guarded[:CHUNK]) == set(guarded[CHUNK + BASE.size :]) == {1}
    assert (weights == 2).sum() == hostile.changed == values
