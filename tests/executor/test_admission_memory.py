"""The clauses of the rule about memory, and about a new request that already decodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.executor import admission
from rose.executor.admission import Question, Refusal, Terms, Window
from rose.executor.facts import ServingFacts

NOW = 1000.0
FACTS = ServingFacts(ttft_s=1.0, tpot_s=0.5, clear_with_new_s=0.2, next_step_with_new_s=0.2)
LACKS = replace(FACTS, kv_lacks=1)
GPU, CPU = Terms(), Terms(preempt_s=0.002)
BUDGET = Terms(error_budget=0.5)


def window(facts: ServingFacts, terms: Terms = GPU, **more: float) -> Window:
    return admission.window(Question(facts, terms, NOW, **more))


# ---- serving that lacks memory


@pytest.mark.parametrize("terms", [GPU, CPU, BUDGET])
def test_while_a_request_waits_for_memory_nothing_is_granted(terms: Terms) -> None:
    waits = replace(
        FACTS, waiting=1, prefill_deadline=NOW + 9.0, kv_need=11, kv_quota=10, arrival_rate=1.0
    )
    if terms is CPU:
        assert window(waits, terms).seconds == 0.0  # serving is busy anyway
        return
    shut = window(waits, terms, allowance=100.0)
    assert (shut.seconds, shut.binding) == (0.0, Refusal.MEMORY)
    assert window(replace(waits, kv_need=10), terms, allowance=100.0).seconds > 0.0
    assert window(replace(waits, waiting=0, running=1), terms, allowance=100.0).seconds > 0.0


def test_a_preempted_step_counts_whole_while_serving_lacks_memory() -> None:
    assert window(FACTS, CPU, give_back_s=0.1).seconds == math.inf
    short = window(LACKS, CPU, give_back_s=0.1)
    assert short.seconds == pytest.approx(1.0 - 0.2 - 0.1)
    assert short.binding == Refusal.MEMORY
    assert window(LACKS, CPU, give_back_s=0.8) == Window(0.0, binding=Refusal.MEMORY)
    assert window(LACKS, CPU, give_back_s=9.0).seconds == 0.0


def test_without_preemption_the_hand_over_is_kept_free_too() -> None:
    loose = replace(LACKS, tpot_s=9.0)
    assert window(loose).seconds == pytest.approx(0.8)
    late = window(loose, give_back_s=0.3)
    assert late.seconds == pytest.approx(0.5)
    assert late.binding == Refusal.MEMORY
    assert window(replace(loose, kv_lacks=0), give_back_s=0.3).seconds == pytest.approx(0.8)


def test_a_request_unseen_waits_for_memory_as_well() -> None:
    flight = replace(LACKS, next_step_s=0.25)
    assert window(flight, CPU, give_back_s=0.1).seconds == pytest.approx(1.0 - 0.25 - 0.2 - 0.1)


def test_no_budget_buys_what_giving_back_takes() -> None:
    paid = replace(LACKS, arrival_rate=1e-6, tpot_s=9.0, clear_with_new_s=0.99)
    most = window(paid, BUDGET, allowance=1e9, give_back_s=0.3).seconds
    assert 0.0 < most <= 1.0 - 0.3 + 1e-9
    assert window(replace(paid, kv_lacks=0), BUDGET, allowance=1e9).seconds > most


@given(st.floats(0, 2), st.floats(0, 2), st.integers(0, 1), st.sampled_from([GPU, CPU, BUDGET]))
def test_longer_hand_overs_never_lend_more(
    give_back_s: float, more_s: float, lacks: int, terms: Terms
) -> None:
    facts = replace(FACTS, kv_lacks=lacks, arrival_rate=0.1)
    less = window(facts, terms, give_back_s=give_back_s + more_s, allowance=1.0).seconds
    most = window(facts, terms, give_back_s=give_back_s, allowance=1.0).seconds
    assert less <= most
    assert lacks or less == most


# ---- whoever has just begun to decode


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.49])
def test_the_next_token_of_a_new_request_is_kept_free_with_nobody_here(after_s: float) -> None:
    facts = replace(FACTS, next_step_after_new_s=after_s)
    assert window(facts).seconds == pytest.approx(0.5 - after_s)
    assert window(facts).binding == Refusal.DECODE
    running = replace(facts, running=1, decode_deadline=NOW + 9.0)
    assert window(running).seconds == pytest.approx(0.5 - after_s)


def test_a_pace_that_cannot_be_kept_with_one_more_lends_nothing() -> None:
    facts = replace(FACTS, next_step_after_new_s=0.51)
    for terms in (GPU, CPU):
        assert window(facts, terms).seconds == 0.0
        assert window(facts, terms).binding == Refusal.DECODE


def test_a_preemptible_step_needs_only_its_delay_of_the_pace() -> None:
    nearly = replace(FACTS, next_step_after_new_s=0.4979)
    assert window(nearly, CPU).seconds == math.inf
    assert window(replace(nearly, next_step_after_new_s=0.4981), CPU).seconds == 0.0
