from __future__ import annotations

import sys

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.executor.memory import (
    CALM_S,
    GROW_SHARE,
    POLICIES,
    SURPLUS_SHARE,
    UNSEEN_S,
    WATERMARK,
    Budget,
    Demand,
    MemoryTerms,
    ceiling,
    decide,
    low_water,
    may_use,
    reach,
    serving_quota,
)

TOTAL = 1600
FLOOR = 320


def terms(policy: str = "aimd", headroom: float = 0.2, most: int = TOTAL) -> MemoryTerms:
    return MemoryTerms(TOTAL, headroom, policy, most)


def busy(need: int, *, step: int = 0, active: bool = True, **more: float) -> Demand:
    return Demand(active, need, rl_step=step, **more)


budgets = st.builds(Budget, st.integers(0, TOTAL), st.floats(0, 100), st.none() | st.integers(0, 3))
demands = st.builds(
    Demand,
    st.booleans(),
    st.integers(0, 2 * TOTAL),
    st.just(0.0) | st.floats(0, 3),
    st.integers(0, 3),
    st.just(0) | st.integers(0, TOTAL),
    st.just(sys.maxsize) | st.integers(0, TOTAL),
)
seen = demands.map(lambda demand: replace(demand, unseen_s=0.0))
all_terms = st.builds(
    MemoryTerms,
    st.just(TOTAL),
    st.sampled_from([0.0, 0.1, 0.2, 0.5]),
    st.sampled_from(POLICIES),
    st.integers(0, TOTAL),
)
times = st.floats(100, 200)


@given(budgets, demands, all_terms, times)
def test_growth_stops_at_the_ceiling(b: Budget, d: Demand, t: MemoryTerms, now: float) -> None:
    after = decide(b, d, t, now).bytes
    assert after >= 0
    if after > b.bytes:
        assert d.active
        assert after <= ceiling(d, t)
        held = d.serving_need + d.serving_warm
        assert after + held + int(t.headroom * t.total) <= t.total
        assert after <= d.useful


@given(budgets, seen, all_terms, times)
def test_serving_beyond_the_watermark_cuts_rollout(
    b: Budget, d: Demand, t: MemoryTerms, now: float
) -> None:
    low = t.headroom * t.total * (1 - WATERMARK)
    after = decide(b, d, t, now)
    if d.active and b.bytes and t.total - b.bytes - d.serving_need < int(low):
        if t.policy == "trim":
            room = t.total - d.serving_need - d.serving_warm - low_water(t.total, t.headroom)
            assert after.bytes == max(0, min(b.bytes, room))
        else:
            assert after.bytes <= b.bytes // 2
        assert d.serving_need + low + after.bytes <= t.total or after.bytes == 0
        assert after.calm_since == now
        assert after.frozen_in == d.rl_step
    elif d.active and not d.serving_warm and d.useful == sys.maxsize:
        assert after.bytes >= b.bytes


@given(budgets, demands, all_terms, times)
def test_a_dormant_engine_holds_nothing(b: Budget, d: Demand, t: MemoryTerms, now: float) -> None:
    if not d.active:
        assert decide(b, d, t, now) == Budget(0, now, None)


@given(budgets, demands, all_terms, times)
def test_beside_a_serving_engine_unseen_nothing_moves_and_then_nothing_is_held(
    b: Budget, d: Demand, t: MemoryTerms, now: float
) -> None:
    after = decide(b, d, t, now)
    assert reach(b, d, t) == 0 or (d.active and not d.unseen_s)
    if d.unseen_s > UNSEEN_S:
        assert after == Budget(0, now, None)
    elif d.unseen_s and d.active:
        assert after == b


@given(budgets, seen, all_terms, times)
def test_warm_prefixes_are_given_way_to_and_no_further(
    b: Budget, d: Demand, t: MemoryTerms, now: float
) -> None:
    low = int(t.headroom * t.total * (1 - WATERMARK))
    cold = t.total - b.bytes - d.serving_need >= low
    if d.active and cold and t.total - b.bytes - d.serving_need - d.serving_warm < low:
        after = decide(b, d, t, now)
        assert after.bytes == min(b.bytes, ceiling(d, t))
        assert after.frozen_in == b.frozen_in


@given(budgets, seen, all_terms, times)
def test_what_rollout_has_no_use_for_goes_back(
    b: Budget, d: Demand, t: MemoryTerms, now: float
) -> None:
    assume(d.active and t.headroom > 0)
    settled = decide(decide(b, d, t, now), d, t, now)
    if settled.bytes <= ceiling(d, t):
        assert settled.bytes - d.useful <= SURPLUS_SHARE * t.total


def test_surplus_is_given_back_at_once_and_little_of_it_never() -> None:
    share = int(SURPLUS_SHARE * TOTAL)
    held = Budget(1000, 50.0)
    assert decide(held, busy(0, useful=1000 - share), terms(), 100.0) == held
    less = decide(held, busy(0, useful=999 - share), terms(), 100.0)
    assert less == Budget(999 - share, 50.0)
    assert decide(less, busy(0, useful=1100), terms(), 100.1).bytes == 1100


def test_after_a_cut_rollout_grows_to_what_it_uses_and_by_steps() -> None:
    cut = Budget(100, 100.0, 0)
    step = int(GROW_SHARE * TOTAL)
    first = decide(cut, busy(0, useful=250), terms(), 100.0 + CALM_S)
    assert first == Budget(100 + step, 100.0 + CALM_S, 0)
    second = decide(first, busy(0, useful=250), terms(), 100.0 + 2 * CALM_S)
    assert (second.bytes, second.frozen_in) == (250, 0)
    assert reach(second, busy(0, useful=250), terms()) == 250  # it may have no more at once


def test_a_dedicated_device_is_used_whole() -> None:
    after = decide(Budget(), busy(0), terms(headroom=0.0), 100.0)
    assert after.bytes == TOTAL


@pytest.mark.parametrize("policy", POLICIES)
def test_a_new_lease_starts_at_the_ceiling(policy: str) -> None:
    assert decide(Budget(), busy(300), terms(policy), 100.0).bytes == TOTAL - 300 - FLOOR


def test_aimd_grows_back_step_by_step_after_calm() -> None:
    cut = decide(Budget(TOTAL - FLOOR), busy(200), terms(), 100.0)
    assert cut.bytes == (TOTAL - FLOOR) // 2
    assert decide(cut, busy(0), terms(), 100.0 + CALM_S / 2) == cut
    budget, now, steps = cut, 100.0, 0
    while budget.bytes < TOTAL - FLOOR:
        now += CALM_S
        grown = decide(budget, busy(0), terms(), now)
        assert grown.bytes == min(budget.bytes + int(GROW_SHARE * TOTAL), TOTAL - FLOOR)
        assert decide(grown, busy(0), terms(), now + CALM_S / 2) == grown
        budget, steps = grown, steps + 1
    assert steps == -(-(TOTAL - FLOOR - cut.bytes) // int(GROW_SHARE * TOTAL))
    assert decide(budget, busy(0), terms(), now + 9) == budget


def test_trim_gives_back_what_the_watermark_lacks_and_grows_by_steps() -> None:
    held, pressing = TOTAL - FLOOR, FLOOR // 2 + 50
    cut = decide(Budget(held), busy(pressing), terms("trim"), 100.0)
    assert cut == Budget(TOTAL - pressing - low_water(TOTAL, 0.2), 100.0, 0)
    assert decide(cut, busy(pressing), terms("trim"), 200.0) == Budget(cut.bytes, 200.0, 0)
    assert decide(cut, busy(0), terms("trim"), 100.0 + CALM_S / 2) == cut
    grown = decide(cut, busy(0), terms("trim"), 100.0 + CALM_S)
    assert grown.bytes == min(cut.bytes + int(GROW_SHARE * TOTAL), held)
    assert decide(Budget(held), busy(TOTAL), terms("trim"), 100.0).bytes == 0


def test_trim_gives_way_to_warm_prefixes_up_to_the_watermark() -> None:
    demand = Demand(True, 0, serving_warm=400)
    after = decide(Budget(TOTAL - FLOOR), demand, terms("trim"), 100.0)
    assert after == Budget(TOTAL - 400 - low_water(TOTAL, 0.2), 100.0, None)


def test_aimd_comes_back_from_nothing() -> None:
    none_left = decide(Budget(100), busy(TOTAL), terms(), 100.0)
    assert none_left.bytes == 0
    assert decide(none_left, busy(0), terms(), 100.0 + CALM_S / 2).bytes == 0
    assert decide(none_left, busy(0), terms(), 100.0 + CALM_S).bytes == int(GROW_SHARE * TOTAL)


def test_pressure_short_of_a_cut_is_no_calm() -> None:
    """Between the watermark and the headroom nothing moves, and the wait for calm begins anew."""
    budget = Budget(TOTAL - FLOOR, 100.0)
    pressed = decide(budget, busy(100), terms(), 150.0)
    assert (pressed.bytes, pressed.calm_since) == (budget.bytes, 150.0)


@given(st.lists(st.tuples(st.integers(0, TOTAL), st.floats(0.0, 5.0)), max_size=20))
def test_halve_and_freeze_stays_frozen_until_the_next_step(
    later: list[tuple[int, float]],
) -> None:
    budget = decide(Budget(TOTAL - FLOOR), busy(200), terms("halve_and_freeze"), 100.0)
    now = 100.0
    for need, wait in later:
        now += wait
        after = decide(budget, busy(need), terms("halve_and_freeze"), now)
        assert after.bytes <= budget.bytes
        budget = after
    thawed = decide(budget, busy(0, step=1), terms("halve_and_freeze"), now)
    assert thawed == Budget(TOTAL - FLOOR, now, None)


@given(st.integers(0, 3 * TOTAL), st.floats(0, 1), st.integers(0, 2 * TOTAL))
def test_serving_keeps_its_headroom_whatever_is_claimed(
    claim: int, headroom: float, kv_max: int
) -> None:
    quota = serving_quota(TOTAL, claim, headroom, kv_max)
    assert quota <= kv_max
    assert quota >= min(kv_max, int(headroom * TOTAL))
    if claim <= TOTAL - int(headroom * TOTAL):
        assert quota + claim <= TOTAL


@given(*[st.integers(0, TOTAL)] * 5)
def test_a_raised_claim_may_be_filled_only_beside_an_acknowledged_quota(
    claim: int, revision: int, acked: int, quota: int, total: int
) -> None:
    allowed = may_use(claim, revision, acked, quota, total)
    assert allowed == (acked >= revision and quota + claim <= total)
