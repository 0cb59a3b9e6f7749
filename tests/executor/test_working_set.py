"""The ghost cache against one written out plainly; what counts as warm; the book of prefixes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.executor.prefix_book import FADE, PrefixBook
from rose.executor.working_set import (
    BUCKETS,
    COUNT_S,
    PER_DOUBLING,
    PRESUMED_S,
    PRESUMED_SHARE,
    REMEMBERED,
    SHORTEST_S,
    Hits,
    WorkingSet,
)

NOW = 10_000.0
FIFTH = 2 ** (1 / PER_DOUBLING)


class PlainCache:
    """Least recently used first, and nothing that a request holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.idle: list[str] = []
        self.holders: list[str] = []
        """One entry for each request that holds a block."""

    def begin(self, blocks: Sequence[str]) -> int:
        here = [block in self.idle or block in self.holders for block in blocks]
        self.idle = [block for block in self.idle if block not in blocks]
        self.holders += blocks
        self.evict()
        return len(list(itertools.takewhile(bool, here)))

    def end(self, began: Sequence[str], blocks: Sequence[str]) -> None:
        for block in began:
            self.holders.remove(block)
        for block in reversed(blocks):
            if block not in self.holders:
                self.idle = [other for other in self.idle if other != block] + [block]
        self.evict()

    def evict(self) -> None:
        while self.idle and len(self.idle) + len(set(self.holders)) > self.capacity:
            self.idle.pop(0)


def chain(text: str) -> tuple[str, ...]:
    """Blocks as vLLM names them: each by all up to it."""
    return tuple(text[: end + 1] for end in range(len(text)))


Prompts = st.text("ab", max_size=6)
Streams = st.lists(
    st.tuples(st.just("begin"), Prompts, st.floats(0, 5))
    | st.tuples(st.just("end"), st.text("ab", max_size=3), st.floats(0, 5)),
    max_size=60,
)


@given(st.integers(0, 20), Streams)
def test_it_hits_what_a_plain_cache_hits(
    capacity: int, stream: list[tuple[str, str, float]]
) -> None:
    ghost, plain, now = WorkingSet(capacity), PlainCache(capacity), NOW
    running: list[str] = []
    for what, text, wait in stream:
        now += wait
        if what == "begin":
            hits = ghost.begin(chain(text), now)
            assert hits == Hits(len(text), plain.begin(chain(text)))
            running.append(text)
        elif running:
            prompt = running.pop(len(text) % len(running))
            ghost.end(chain(prompt), chain(prompt + text), now)
            plain.end(chain(prompt), chain(prompt + text))
        assert list(ghost._idle) == plain.idle
        assert set(ghost._used) == set(plain.holders)
        assert sum(ghost._born.values()) == len(plain.idle)
        assert 0 <= ghost.warm(now) <= max(len(plain.idle), capacity)


@given(st.integers(1, 20), Streams)
def test_no_block_is_held_once_all_requests_have_ended(
    capacity: int, stream: list[tuple[str, str, float]]
) -> None:
    ghost = WorkingSet(capacity)
    prompts = [chain(text) for what, text, _ in stream if what == "begin"]
    for prompt in prompts:
        ghost.begin(prompt, NOW)
    for prompt in reversed(prompts):
        ghost.end(prompt, prompt, NOW)
    assert not ghost._used
    assert len(ghost._idle) == min(capacity, len(set(itertools.chain(*prompts))))


# ---- patience


def come_back(ghost: WorkingSet, age: float, block: str = "a", at: float = NOW) -> float:
    """One block is used, left alone so long, and hit."""
    ghost.begin((block,), at)
    ghost.end((block,), (block,), at)
    ghost.begin((block,), at + age)
    ghost.end((block,), (block,), at + age)
    return at + age


@given(st.lists(st.floats(0, 200_000), min_size=1, max_size=200), st.floats(0, 0.5))
def test_patience_is_the_age_below_which_all_but_the_loss_of_the_hits_fell(
    ages: list[float], loss: float
) -> None:
    ghost = WorkingSet(10, loss)
    for number, age in enumerate(ages):
        come_back(ghost, age, f"block {number}")
    patience = ghost.patience()
    longest = SHORTEST_S * FIFTH ** (BUCKETS - 1)
    beyond = sum(min(age, longest) >= patience * 1.0001 for age in ages)
    assert beyond <= loss * len(ages)
    shorter = patience / FIFTH
    if shorter > SHORTEST_S:  # not longer than it has to be, by a fifth
        assert sum(age >= shorter * 0.9999 for age in ages) > loss * len(ages)


def test_without_hits_there_is_no_patience() -> None:
    assert WorkingSet(10).patience() == 0.0
    assert WorkingSet(10, loss=1.0).patience() == 0.0


def test_old_habits_fade() -> None:
    ghost = WorkingSet(10, loss=0.3)
    now = NOW
    for _ in range(REMEMBERED // 2):
        now = come_back(ghost, 3000.0, at=now)
    for _ in range(3 * REMEMBERED):
        now = come_back(ghost, 1.0, at=now)
    assert ghost._hits < REMEMBERED
    assert ghost.patience() < 2.0


# ---- what is worth keeping


def used_and_left(ghost: WorkingSet, names: Iterable[str], now: float) -> None:
    for name in names:
        ghost.begin((name,), now)
        ghost.end((name,), (name,), now)


def test_what_has_had_no_time_to_come_back_is_presumed_warm_up_to_half() -> None:
    ghost = WorkingSet(10)
    used_and_left(ghost, "abc", NOW)
    assert ghost.warm(NOW) == 3
    used_and_left(ghost, "defghi", NOW + 1.0)
    assert ghost.warm(NOW + 1.0) == PRESUMED_SHARE * 10
    assert ghost.warm(NOW + PRESUMED_S + 3.0) == 0


def test_what_is_in_use_is_of_the_half_that_is_presumed() -> None:
    ghost = WorkingSet(10)
    used_and_left(ghost, "abcde", NOW)
    ghost.begin(("x", "y"), NOW)
    assert ghost.warm(NOW) == PRESUMED_SHARE * 10 - 2
    ghost.end(("x", "y"), ("x", "y"), NOW + 1.0)
    assert ghost.warm(NOW + 1.0) == PRESUMED_SHARE * 10


def test_what_has_come_back_is_kept_whatever_is_in_use() -> None:
    ghost = WorkingSet(10)
    for name in "abcd":
        come_back(ghost, 100.0, name)
    ghost.begin(tuple("uvwxyz"), NOW + 100.0)
    assert ghost.warm(NOW + 101.0) == 4


def test_where_nobody_comes_back_next_to_nothing_is_presumed() -> None:
    ghost, now = WorkingSet(100), NOW
    shares = []
    for number in range(1000):
        used_and_left(ghost, chr(number + 33), now)
        now += 0.1
        if number % 100 == 99:
            shares.append(ghost.warm(now) / 100)
    assert shares[0] == PRESUMED_SHARE
    assert shares[:5] == sorted(shares[:5], reverse=True)
    assert max(shares[5:]) < 0.1


def test_one_burst_that_comes_back_is_believed_again() -> None:
    ghost, now = WorkingSet(100), NOW
    for number in range(1000):
        used_and_left(ghost, chr(number + 33), now)
    doubted = ghost.warm(now)
    for _ in range(10):
        now += 300.0
        used_and_left(ghost, [chr(number + 33) for number in range(900, 1000)], now)
    assert ghost.warm(now + 1.0) >= PRESUMED_SHARE * 100 > 5 * doubted


def test_a_cache_that_was_emptied_keeps_nothing_and_finds_nothing() -> None:
    ghost = WorkingSet(10)
    come_back(ghost, 10.0, "a")
    ghost.begin(("x",), NOW + 20.0)
    ghost.empty()
    assert ghost.warm(NOW + 20.0) == 0
    assert ghost.begin(("a",), NOW + 21.0) == Hits(1, 0)
    ghost.end(("x",), ("x",), NOW + 21.0)
    assert ghost.begin(("x",), NOW + 22.0) == Hits(1, 1)  # it was in use


def test_what_comes_back_is_kept_for_as_long_as_it_usually_takes() -> None:
    ghost = WorkingSet(10, loss=0.0)
    for name in "abcdefgh":
        come_back(ghost, 2000.0, name)
    seen = NOW + 2000.0
    assert ghost.warm(seen) == 8
    assert ghost.warm(seen + 1999.0) == 8
    assert ghost.warm(seen + 2000.0 * FIFTH * FIFTH) == 0


def test_what_is_used_is_not_counted_twice() -> None:
    ghost = WorkingSet(10)
    ghost.begin(("a", "b"), NOW)
    assert ghost.warm(NOW) == 0


def test_who_may_lose_all_keeps_nothing() -> None:
    ghost = WorkingSet(10, loss=1.0)
    for name in "abc":
        come_back(ghost, 10.0, name)
    assert ghost.warm(NOW + 10.0) == 0


def test_the_count_is_a_moment_old_at_most_also_when_time_goes_back() -> None:
    ghost = WorkingSet(10)
    used_and_left(ghost, "a", NOW)
    assert ghost.warm(NOW) == 1
    used_and_left(ghost, "b", NOW)
    assert ghost.warm(NOW + COUNT_S / 2) == 1
    assert ghost.warm(NOW + COUNT_S) == 2
    used_and_left(ghost, "c", NOW)
    assert ghost.warm(NOW) == 3


# ---- the book


def test_what_the_engine_did_not_find_again_was_lost_to_lending() -> None:
    book = PrefixBook(100, 16, 0.02)
    blocks = list("abcd")
    book.begin("first", blocks, 64, NOW)
    book.found("first", 0)
    blocks.append("e")  # its answer fills another
    book.end("first", NOW + 1.0)
    book.begin("second", list("abcde"), 80, NOW + 2.0)
    assert book.lost == 0
    book.found("second", 16)
    assert (book.tokens, book.hits, book.lost) == (64 + 80, 16, 48)
    assert book.loss == pytest.approx(48 / 64)


def test_the_block_of_the_last_token_is_never_found() -> None:
    book = PrefixBook(100, 16, 0.02)
    for number, tokens in enumerate((64, 64)):
        book.begin(str(number), list("abcd"), tokens, NOW)
        book.found(str(number), 48 if number else 0)
        book.end(str(number), NOW)
    assert book.lost == 0
    assert PrefixBook(1, 16, 0.02).cache.begin((), NOW) == Hits(0, 0)


def test_only_the_first_look_at_a_prompt_counts() -> None:
    book = PrefixBook(100, 16, 0.02)
    book.begin("a", list("abcd"), 64, NOW)
    for tokens in (16, 32, 48):  # after a preemption it is looked up again
        book.found("a", tokens)
    assert (book.tokens, book.hits) == (64, 16)
    book.found("unknown", 16)
    book.end("unknown", NOW)
    assert (book.tokens, book.hits, book.names()) == (64, 16, ["a"])


def test_more_than_expected_is_no_negative_loss() -> None:
    book = PrefixBook(100, 16, 0.02)
    book.begin("a", list("abcd"), 64, NOW)
    book.found("a", 48)
    assert (book.lost, book.loss) == (0, 0.0)


def test_recent_loss_fades_and_the_sum_does_not() -> None:
    book = PrefixBook(100, 16, 0.02)
    for number in range(3000):
        book.begin(str(number), list("ab"), 32, NOW)
        book.found(str(number), 0 if number < 10 else 16)
        book.end(str(number), NOW)
    assert book.lost == 9 * 16  # the very first had nothing to find
    assert book.loss < 9 * FADE**2990
    assert math.isclose(book.hits, 2990 * 16)
    assert book.names() == []
