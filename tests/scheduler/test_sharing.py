"""Engines by jobs' shares: fair, stable, within limits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.sharing import Claim, Shared, Where, share_out

A, B, C = (("tcp://s:1", name) for name in "abc")
ALL = frozenset((A, B, C))


def engines(count: int, owner: Where | None = None, **more: object) -> list[Shared]:
    return [replace(Shared(f"e{n}", owner, ALL), **more) for n in range(count)]  # type: ignore[arg-type]


def counts(owners: dict[str, Where]) -> list[int]:
    return [list(owners.values()).count(where) for where in (A, B, C)]


def test_free_engines_go_by_share() -> None:
    claims = {A: Claim(share=2), B: Claim(), C: Claim()}
    assert counts(share_out(claims, engines(8), may_move=False)) == [4, 2, 2]


def test_a_fast_engine_counts_for_more() -> None:
    mixed = [replace(e, tokens_per_s=3.0 if e.id == "e0" else 1.0) for e in engines(6)]
    owners = share_out({A: Claim(), B: Claim()}, mixed, may_move=False)
    assert sorted(counts(owners)) == [0, 2, 4]
    assert list(owners.values()).count(owners["e0"]) == 2


def test_what_somebody_has_stays_unless_others_wait() -> None:
    claims = {A: Claim(running=3), B: Claim()}
    fleet = [*engines(4, A), Shared("b", B, ALL)]
    assert counts(share_out(claims, fleet, may_move=True)) == [4, 1, 0]
    claims[B] = Claim(waiting=1)
    assert counts(share_out(claims, fleet, may_move=True)) == [3, 2, 0]
    assert counts(share_out(claims, fleet, may_move=False)) == [4, 1, 0]


def test_who_has_nothing_gets_one_at_once() -> None:
    claims = {A: Claim(running=3), B: Claim()}
    assert counts(share_out(claims, engines(4, A), may_move=False)) == [3, 1, 0]
    assert counts(share_out(claims, engines(1, A), may_move=False)) == [1, 0, 0]


def test_the_last_engine_of_a_job_that_works_stays() -> None:
    claims = {A: Claim(running=1), B: Claim(waiting=9)}
    assert counts(share_out(claims, engines(1, A), may_move=True)) == [1, 0, 0]
    claims[A] = Claim()
    assert counts(share_out(claims, engines(1, A), may_move=True)) == [0, 1, 0]


def test_the_one_with_fewest_turns_goes() -> None:
    busy = [replace(e, turns=5 if e.id != "e2" else 1) for e in engines(4, A)]
    claims = {A: Claim(running=16), B: Claim(waiting=1)}
    assert share_out(claims, busy, may_move=True)["e2"] == B


def test_nobody_borrows_more_than_it_may() -> None:
    claims = {A: Claim(most_borrowed=1), B: Claim(share=0.1, most_borrowed=2)}
    assert counts(share_out(claims, engines(5, borrowed=True), may_move=True)) == [1, 2, 0]


def test_an_engine_is_given_only_to_jobs_that_it_may_serve() -> None:
    only_b = [replace(e, allowed=frozenset((B,))) for e in engines(3, A)]
    assert counts(share_out({A: Claim(), B: Claim()}, only_b, may_move=False)) == [0, 3, 0]


@given(
    st.lists(st.tuples(st.floats(0.1, 4), st.integers(0, 3), st.integers(0, 3)), max_size=3),
    st.lists(st.tuples(st.floats(1, 9), st.sampled_from([None, A, B])), max_size=7),
)
def test_it_settles(
    told: list[tuple[float, int, int]], made: list[tuple[float, Where | None]]
) -> None:
    """As long as the jobs' turns stay as they are, engines change hands a few times at most."""
    claims = {
        where: Claim(share, waiting=waiting, running=max(running, 1))
        for where, (share, waiting, running) in zip((A, B, C), told, strict=False)
    }
    fleet = [Shared(f"e{n}", owner, ALL, speed) for n, (speed, owner) in enumerate(made)]
    for _ in range(20):
        owners = share_out(claims, fleet, may_move=True)
        before, fleet = fleet, [replace(e, owner=owners.get(e.id)) for e in fleet]
    assert fleet == before
    assert all(e.owner in claims for e in fleet) or not claims
