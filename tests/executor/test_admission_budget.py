"""The error budget: lending makes no more serving requests late than it spent, nor than it earned.

Poisson traffic (`traffic.py`) says how many requests lending really made late. Their number less
the risk spent is a martingale at best, whose variance is about the risk (late requests come one by
one), so over the fixed seeds it may exceed the risk by `SIGMAS` roots of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.executor.device import Ask, Grant, Rule, admit, rose
from tests.executor.traffic import Outcome, Traffic, refuse, run

from rose.executor import admission
from rose.executor.admission import Refusal, Terms
from rose.executor.budget import FIRST_REQUESTS, SAVED_REQUESTS, ErrorBudget
from rose.executor.facts import NodeOrders, ServingFacts
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.slo import Slo

SIGMAS = 3.0
WANT = Step(512, 8, 0)
HOPELESS = Traffic(1.0, Slo(0.12, 1.0))
"""The longest prompt alone nearly takes the promise: the rule without budget never lends. Answers
of one token have no pace to keep."""
GUARDED = Traffic(1.0, Slo(0.15, 1.0), guarded=256)
"""One prompt in ten is longer than the worst case that serving guards itself against."""
CHAT = Traffic(2.0, Slo(0.15, 0.04), outputs=(10, 40, 100), credit=0.3)
MIXED = dataclasses.replace(CHAT, exact=False, true=0.7)


def total(
    traffic: Traffic, share: float, rule: Rule = rose, runs: int = 5, requests: int = 400
) -> tuple[Outcome, int]:
    """All runs together, and how many requests were late because of lending."""
    terms, all_of_them, late = Terms(error_budget=share), Outcome(), 0
    for seed in range(runs):
        lent = run(traffic, seed, requests, rule, terms, WANT)
        late += len(lent.late - run(traffic, seed, requests, refuse, terms, WANT).late)
        all_of_them.tokens += lent.tokens
        all_of_them.risk += lent.risk
        all_of_them.earned += lent.earned
    return all_of_them, late


def overspent(outcome: Outcome, late: int) -> bool:
    risk = max(0.0, outcome.risk)
    return late > risk + SIGMAS * math.sqrt(risk)


def test_no_more_requests_are_late_than_the_risk_that_was_spent() -> None:
    outcome, late = total(HOPELESS, 0.02)
    assert 0.9 * outcome.earned < outcome.risk <= outcome.earned
    assert late > 0.5 * outcome.risk  # the estimate is no better than it must be, nor much worse
    assert not overspent(outcome, late)


def half_the_risk(q: Ask) -> Grant:
    grant = rose(q._replace(allowance=2 * q.allowance))
    return dataclasses.replace(grant, risk=grant.risk / 2)


def test_half_the_risk_is_caught() -> None:
    assert overspent(*total(HOPELESS, 0.02, half_the_risk))


def test_risk_without_its_clip_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_clip", lambda seconds, most: seconds)
    assert overspent(*total(HOPELESS, 0.02, runs=3))


@pytest.mark.parametrize(("traffic", "gain"), [(CHAT, 1.05), (MIXED, 1.2)])
def test_a_budget_lends_more_beside_running_requests(traffic: Traffic, gain: float) -> None:
    without, _ = total(traffic, 0.0, runs=1, requests=250)
    outcome, late = total(traffic, 0.005, runs=1, requests=250)
    assert without.risk == 0.0
    assert outcome.tokens >= gain * without.tokens
    assert 0 < outcome.risk <= outcome.earned
    assert not overspent(outcome, late)


def test_prompts_beyond_the_guard_are_paid_from_the_budget() -> None:
    outcome, late = total(GUARDED, 0.002)
    assert outcome.tokens > 0
    assert outcome.risk <= outcome.earned
    assert late <= outcome.earned + SIGMAS * math.sqrt(outcome.earned)
    assert not overspent(outcome, late)
    strict, late = total(GUARDED, 0.0)
    assert late > outcome.earned + SIGMAS * math.sqrt(outcome.earned)  # the rule has none to pay
    assert strict.tokens > 0


def test_a_budget_lends_where_the_worst_case_never_fits() -> None:
    assert total(HOPELESS, 0.0, runs=1, requests=100)[0].tokens == 0
    assert total(HOPELESS, 0.005, runs=1, requests=100)[0].tokens > 50_000


# ---- one question at a time

NOW = 1000.0
LATENCY = Tracker(Profile("m", "d", 0.01, 0.001, 0.002, 0.0, margin=1.25, error=0.0))
RARELY_LATE = ServingFacts(
    ttft_s=1.0,
    tpot_s=0.1,
    clear_new_25_s=0.1,
    clear_new_62_s=0.1,
    clear_new_82_s=0.1,
    clear_new_93_s=0.1,
    clear_new_98_s=0.99,
    clear_with_new_s=0.99,
    arrival_rate=2.0,
)
"""Only the longest prompts, 3 of 100, would be late."""


def ask(facts: ServingFacts, want: Step, allowance: float, **terms: float) -> Grant:
    terms = {"error_budget": 0.005, **terms}
    return admit(facts, want, LATENCY, Terms(**terms), NOW, allowance=allowance)


def test_the_risk_of_a_step_is_the_expected_number_of_late_requests() -> None:
    want = Step(0, 20, 0)
    upper = LATENCY.upper(want)
    grant = ask(RARELY_LATE, want, 1.0)
    one_is_long = 0.03 * (upper + 0.99 - 1.0)
    one_of_two_is_long = (1 - 0.97**2) * upper
    another = 1 - math.exp(-2.0 * upper)
    assert grant.tokens == 20
    assert grant.risk == pytest.approx(
        2.0 * (one_is_long + another * (one_of_two_is_long - one_is_long))
    )
    assert ask(RARELY_LATE, want, grant.risk).tokens == 0  # never spent at once


def test_who_decodes_side_by_side_with_a_step_that_breaks_the_pace_is_late() -> None:
    stalled = replace(RARELY_LATE, next_step_after_new_s=0.06, base_s=0.06)
    want = Step(0, 20, 0)
    assert 0.06 < LATENCY.upper(want) < 0.1 < 2 * 0.06
    assert ask(stalled, want, 0.0, error_budget=0.0).upper_s == 0.0
    span = LATENCY.upper(want)  # whoever comes in it may decode beside it
    assert ask(stalled, want, 100.0).risk == pytest.approx(2.0 * span, rel=0.05)
    on_pace = replace(stalled, base_s=0.04)  # held up by as much again, and still in time
    assert ask(on_pace, want, 100.0).risk < 0.1
    too_slow_by_itself = replace(stalled, base_s=0.11)
    assert ask(too_slow_by_itself, want, 100.0).risk < 0.1


def test_who_is_late_by_itself_is_nobodys_fault() -> None:
    hopeless = replace(RARELY_LATE, clear_new_98_s=1.01, clear_with_new_s=1.01)
    grant = ask(hopeless, Step(0, 20, 0), 1.0)
    assert grant.tokens == 20
    assert 0.0 < grant.risk < ask(RARELY_LATE, Step(0, 20, 0), 1.0).risk  # others may meet it


def test_nothing_is_spent_on_what_is_safe_anyway() -> None:
    safe = replace(RARELY_LATE, clear_with_new_s=0.2, clear_new_98_s=0.2)
    assert ask(safe, Step(0, 20, 0), 1.0) == ask(safe, Step(0, 20, 0), 0.0)


def test_beyond_the_guard_only_what_can_be_paid_is_lent() -> None:
    facts = replace(RARELY_LATE, clear_new_98_s=0.95)
    guarded = replace(facts, clear_with_new_s=0.2)
    want = Step(0, 20, 0)
    unpaid, some, paid = (ask(guarded, want, allowance) for allowance in (0.0, 0.05, 1.0))
    assert 0.0 == unpaid.upper_s < some.upper_s < paid.upper_s == LATENCY.upper(want)
    assert 0.0 < some.risk < 0.05
    assert paid.risk == ask(facts, want, 1.0).risk > 0.0
    assert ask(guarded, want, 0.0, error_budget=0.0).tokens == 20


def test_without_a_rate_there_is_no_estimate_and_no_budget() -> None:
    unknown = replace(RARELY_LATE, arrival_rate=0.0)
    assert ask(unknown, Step(0, 20, 0), 1.0) == Grant(0, Refusal.ARRIVAL)


def test_nothing_wanted_is_nothing_granted() -> None:
    assert ask(RARELY_LATE, Step(0, 0, 0), 1.0).tokens == 0
    assert ask(replace(RARELY_LATE, ttft_s=0.1), Step(0, 0, 0), 1.0).tokens == 0


def test_preemption_needs_no_budget() -> None:
    assert ask(replace(RARELY_LATE, clear_with_new_s=1.0), WANT, 1.0, preempt_s=0.002).tokens == 0


@given(st.integers(0, 600), st.integers(1, 64), st.floats(0, 10), st.floats(0.1, 2), st.booleans())
def test_more_allowance_never_lends_less(
    prefill: int, decode: int, allowance: float, ttft_s: float, busy: bool
) -> None:
    facts = replace(RARELY_LATE, ttft_s=ttft_s)
    if busy:
        facts = replace(facts, running=2, decode_deadline=NOW + 0.4, next_step_with_new_s=0.9)
    hard, some, more = (ask(facts, Step(prefill, decode, 0), a) for a in (0, allowance, 20.0))
    assert hard.tokens <= some.tokens <= more.tokens
    assert hard.risk == 0.0
    assert some.risk <= allowance
    if busy and some.tokens:
        assert some.upper_s <= 0.4


# ---- the purse


def test_every_arrival_earns_its_share_and_steps_spend_it() -> None:
    budget = ErrorBudget(0.005)
    budget.earn(1000)
    first = budget.left
    assert first == pytest.approx(0.005 * FIRST_REQUESTS)
    budget.earn(1100)
    assert budget.left == pytest.approx(first + 0.5)
    budget.spend(0.2)
    budget.earn(1100)
    assert budget.left == pytest.approx(first + 0.3)


def test_no_more_is_saved_than_a_few_requests_earn() -> None:
    budget = ErrorBudget(0.005)
    budget.earn(0)
    budget.earn(10 * SAVED_REQUESTS)
    assert budget.left == pytest.approx(1.0)
    budget.spend(1.0)
    assert budget.left == pytest.approx(0.0)


def test_a_restarted_serving_engine_counts_from_zero() -> None:
    budget = ErrorBudget(0.01)
    for arrived in (500, 510, 3, 5):
        budget.earn(arrived)
    assert budget.left == pytest.approx(0.01 * (FIRST_REQUESTS + 10 + 3 + 2))


def test_a_budget_that_is_taken_back_is_gone() -> None:
    budget = ErrorBudget(0.01)
    budget.earn(0)
    budget.earn(100)
    budget.allow(0.0)
    assert budget.left == 0.0
    budget.earn(200)
    budget.allow(0.01)
    assert budget.left == pytest.approx(0.01 * FIRST_REQUESTS)


Counts = st.lists(st.integers(0, 400), max_size=20)


@given(Counts, st.floats(0, 1), st.sampled_from([lambda x: x, lambda x: x / 2]))
def test_never_more_is_spent_than_earned(
    counts: list[int], share: float, taken: Callable[[float], float]
) -> None:
    budget, spent, arrived = ErrorBudget(share), 0.0, 0
    budget.earn(0)
    for new in counts:
        arrived += new
        budget.earn(arrived)
        assert 0.0 <= budget.left <= share * SAVED_REQUESTS
        part = taken(budget.left)
        budget.spend(part)
        spent += part
    assert spent <= share * (arrived + FIRST_REQUESTS) * (1 + 1e-9)


def test_orders_above_all_requests_are_not_believed() -> None:
    assert NodeOrders(error_budget=1.0).implausible() is None
    assert NodeOrders(error_budget=1.01).implausible() is not None
