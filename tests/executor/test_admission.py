"""The rules one by one. That a grant keeps serving's promises is in `test_admission_promises`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.executor.device import Grant, admit

from rose.executor import admission
from rose.executor.admission import BURST, CHUNK, PATIENCE, RULES, Question, Refusal, Terms
from rose.executor.bounds import Queue, bounds
from rose.executor.facts import FACTS_S, NEVER, ServingFacts
from rose.executor.latency import Profile, Step, Tracker

NOW = 1000.0
LATENCY = Tracker(Profile("m", "d", 0.01, 0.001, 0.002, 0.0, margin=1.25, error=0.0))
"""A step of 64 decodes and 100 prefill tokens: (0.01 + 0.1 + 0.128) * 1.25 seconds."""
DECODES = Step(0, 20, 0)
DECODES_S = LATENCY.upper(DECODES)
IDLE = ServingFacts(ttft_s=1.0, tpot_s=0.1, clear_with_new_s=0.2, next_step_with_new_s=0.2)
GPU = Terms()
CPU = Terms(preempt_s=0.002)


def ask(facts: ServingFacts, want: Step = DECODES, terms: Terms = GPU, **more: float) -> Grant:
    return admit(facts, want, LATENCY, terms, NOW, **more)


def test_an_idle_device_is_lent_whole() -> None:
    assert ask(IDLE) == Grant(20, None, DECODES_S)
    assert ask(IDLE, terms=CPU) == Grant(20, None, DECODES_S)


ROOM = DECODES_S + 0.2
"""What a rollout step and the next serving step with a new request take together."""


@pytest.mark.parametrize(
    ("enough", "reason"),
    [
        (replace(IDLE, ttft_s=ROOM), Refusal.ARRIVAL),
        (replace(IDLE, running=1, decode_deadline=NOW + ROOM), Refusal.DECODE),
        (replace(IDLE, waiting=1, prefill_deadline=NOW + ROOM, tpot_s=9.0), Refusal.PREFILL),
        (replace(IDLE, waiting=1, prefill_deadline=NOW + 9.0, tpot_s=ROOM), Refusal.DECODE),
    ],
)
def test_each_condition_refuses_what_no_longer_fits(enough: ServingFacts, reason: Refusal) -> None:
    def tighter(seconds: float) -> ServingFacts:
        return replace(
            enough,
            clear_with_new_s=enough.clear_with_new_s + seconds,
            next_step_with_new_s=enough.next_step_with_new_s + seconds,
        )

    assert ask(tighter(-1e-6)).tokens == 20
    assert ask(tighter(1e-6)).tokens == 19
    assert ask(tighter(DECODES_S)) == Grant(0, reason)


def test_slack_is_lent_beside_serving_that_has_been_busy_for_a_while() -> None:
    idle = replace(IDLE, tpot_s=1.0)
    busy = replace(idle, running=1, decode_deadline=NOW + 1.0)

    def seconds(facts: ServingFacts, busy_s: float) -> float:
        question = Question(facts, GPU, NOW, worth_s=0.1, busy_s=busy_s)
        return admission.window(question).seconds

    assert BURST * idle.ttft_s > PATIENCE * 0.1  # a burst is what is waited for
    assert seconds(busy, BURST * idle.ttft_s) == pytest.approx(0.8)
    assert seconds(busy, BURST * idle.ttft_s - 1e-6) == 0.0
    assert seconds(idle, 0.0) == pytest.approx(0.8)


def test_beside_long_steps_it_takes_as_many_of_them_until_slack_is_lent() -> None:
    facts = replace(IDLE, ttft_s=2.0, tpot_s=5.0, running=1, decode_deadline=NOW + 5.0)

    def seconds(busy_s: float) -> float:
        question = Question(facts, GPU, NOW, worth_s=0.5, busy_s=busy_s)
        return admission.window(question).seconds

    assert BURST * facts.ttft_s < PATIENCE * 0.5
    assert seconds(PATIENCE * 0.5) > 0.5
    assert seconds(PATIENCE * 0.5 - 1e-6) == 0.0


def test_an_arrival_that_would_wait_too_long_is_refused_with_nobody_here() -> None:
    facts = replace(IDLE, ttft_s=1.0, clear_with_new_s=0.99)
    assert ask(facts).refusal == Refusal.ARRIVAL
    assert ask(replace(facts, clear_with_new_s=0.999), terms=CPU).refusal == Refusal.ARRIVAL


def test_a_step_in_flight_counts_until_its_end_and_hides_arrivals_since_it_began() -> None:
    facts = replace(IDLE, running=1, decode_deadline=NOW + 0.5, ttft_s=0.6)
    assert ask(facts).tokens
    late = replace(facts, step_began=NOW, step_ends=NOW + 0.3)
    assert ask(late).refusal == Refusal.DECODE
    hidden = replace(facts, step_began=NOW - 0.4, step_ends=NOW + 0.001)
    assert ask(hidden).refusal == Refusal.ARRIVAL


def test_what_rollout_took_from_a_step_in_flight_delays_its_end() -> None:
    facts = replace(IDLE, running=1, decode_deadline=NOW + 0.4, step_began=NOW, step_ends=NOW + 0.1)
    assert ask(facts).tokens
    assert ask(facts, occupied_s=0.1).refusal == Refusal.DECODE


def test_a_request_may_just_miss_the_next_step() -> None:
    facts = replace(IDLE, running=1, decode_deadline=NEVER, ttft_s=0.6)
    assert ask(replace(facts, next_step_s=0.3)).tokens
    assert ask(replace(facts, next_step_s=0.4)).refusal == Refusal.ARRIVAL


def test_a_preemptible_step_waits_for_serving_but_needs_only_the_preemption_delay() -> None:
    assert ask(replace(IDLE, running=1), terms=CPU) == Grant(0, Refusal.BUSY)
    assert ask(replace(IDLE, waiting=1), terms=CPU) == Grant(0, Refusal.BUSY)
    nearly = replace(IDLE, ttft_s=0.2021)
    assert ask(nearly).refusal == Refusal.ARRIVAL
    assert ask(nearly, terms=CPU).tokens == 20
    assert ask(replace(IDLE, ttft_s=0.2019), terms=CPU).refusal == Refusal.ARRIVAL


def test_prefill_is_cut_to_what_fits() -> None:
    want = Step(400, 2, 0)
    grant = ask(replace(IDLE, ttft_s=0.5, tpot_s=1.0), want)
    prefill = grant.tokens - want.decode
    assert 0 < prefill < 400
    assert grant.upper_s == LATENCY.upper(Step(prefill, 2, 0)) <= 0.3
    assert LATENCY.upper(Step(prefill + 1, 2, 0)) > 0.3


def test_decodes_go_alone_when_no_prefill_fits() -> None:
    decodes = Step(0, 20, 0)
    facts = replace(IDLE, ttft_s=0.2 + LATENCY.upper(decodes) + 1e-6)
    assert ask(facts, Step(100, 20, 0)).tokens == 20
    assert ask(facts, Step(100, 0, 0)).tokens > 0
    assert ask(replace(IDLE, ttft_s=0.2 + 0.001), Step(100, 0, 0)).refusal == Refusal.ARRIVAL


def test_a_serving_engine_that_is_gone_limits_nothing() -> None:
    gone = ServingFacts(ttft_s=math.inf, tpot_s=math.inf)
    assert ask(gone, Step(2000, 3, 0)).tokens == CHUNK + 3
    assert ask(gone, Step(2000, 3, 0), CPU).tokens == CHUNK + 3


@given(
    st.sampled_from(sorted(RULES)),
    st.integers(0, 5000),
    st.integers(0, 64),
    st.sampled_from([None, 0.002]),
    st.floats(0, 100),
)
def test_no_rule_grants_more_than_a_chunk_or_than_wanted(
    rule: str, prefill: int, decode: int, preempt_s: float | None, ttft_s: float
) -> None:
    facts = replace(IDLE, ttft_s=ttft_s)
    grant = ask(facts, Step(prefill, decode, 0), Terms(rule, preempt_s))
    assert grant.tokens <= min(prefill, CHUNK) + decode
    assert (grant.tokens == 0) or grant.refusal is None


@given(
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 400),
    st.integers(0, 64),
)
def test_the_bound_of_a_grant_is_within_every_slack(
    decode_in: float, first_in: float, next_s: float, clear_s: float, prefill: int, decode: int
) -> None:
    facts = ServingFacts(
        running=1,
        waiting=1,
        decode_deadline=NOW + decode_in,
        prefill_deadline=NOW + first_in,
        next_step_with_new_s=next_s,
        clear_with_new_s=max(next_s, clear_s),
        ttft_s=1.5,
        tpot_s=0.5,
    )
    grant = ask(facts, Step(prefill, decode, 0))
    if grant.tokens:
        assert NOW + grant.upper_s + next_s <= NOW + decode_in + 1e-9
        assert NOW + grant.upper_s + facts.clear_with_new_s <= NOW + first_in + 1e-9
        assert grant.upper_s + facts.clear_with_new_s <= 1.5 + 1e-9


def test_idle_gate_looks_only_at_whether_serving_is_empty() -> None:
    gate = Terms("idle_gate")
    hopeless = replace(IDLE, ttft_s=0.01, clear_with_new_s=5.0)
    assert ask(hopeless, terms=gate).tokens == 20
    assert ask(replace(IDLE, running=1), terms=gate) == Grant(0, Refusal.BUSY)
    assert ask(replace(IDLE, waiting=1), terms=gate) == Grant(0, Refusal.BUSY)


def test_paper_slack_wants_positive_slack_and_ignores_the_rollout_step() -> None:
    paper = Terms("paper_slack")
    facts = replace(
        IDLE,
        running=1,
        waiting=1,
        next_step_s=0.05,
        clear_s=0.1,
        decode_deadline=NOW,
        tight_decode_deadline=NOW + 0.0501,
        prefill_deadline=NOW + 0.1001,
    )
    long = Step(CHUNK, 64, 0)
    assert LATENCY.upper(long) > 0.5
    assert ask(facts, long, paper).tokens == CHUNK + 64
    assert ask(replace(facts, clear_s=0.1002), long, paper).refusal == Refusal.PREFILL
    assert ask(replace(facts, next_step_s=0.0502), long, paper).refusal == Refusal.DECODE


def test_share_all_grants_whatever_happens() -> None:
    facts = replace(IDLE, running=5, decode_deadline=NOW - 1, prefill_deadline=NOW - 1, ttft_s=0.0)
    assert ask(facts, terms=Terms("share_all")).tokens == 20


def test_static_split_takes_half_of_every_second() -> None:
    split = Terms("static_split")
    hopeless = replace(IDLE, running=5, decode_deadline=NOW - 1)
    granted = [
        admit(hopeless, DECODES, LATENCY, split, NOW + k / 10 + 0.01).tokens > 0 for k in range(20)
    ]
    assert granted == ([True] * 5 + [False] * 5) * 2


def test_a_step_past_its_bound_is_waited_for() -> None:
    facts = replace(IDLE, running=1, step_began=NOW - 0.1, step_ends=NOW - 0.01)
    assert ask(facts) == Grant(0, Refusal.BUSY)
    assert ask(facts, occupied_s=0.02).tokens == 20
    assert ask(replace(facts, running=0)).tokens == 20


@pytest.mark.parametrize("rule", sorted(RULES))
def test_old_facts_are_not_believed(rule: str) -> None:
    terms = Terms(rule)
    at_the_end = replace(IDLE, written=NOW - FACTS_S)
    assert ask(at_the_end, terms=terms).tokens == 20
    ends = {"share_all": math.inf, "static_split": NOW + 0.5}.get(rule)
    old = ask(replace(IDLE, written=NOW - FACTS_S - 0.01), terms=terms)
    blind = Grant(20, None, DECODES_S, until=ends or NOW)
    assert old == (blind if ends else Grant(0, Refusal.PAGE))
    assert ask(at_the_end, terms=terms).until == (ends or NOW)


@pytest.mark.parametrize("rule", ["rose", "idle_gate", "paper_slack"])
def test_facts_from_the_future_are_not_believed(rule: str) -> None:
    lie = replace(IDLE, written=NOW + 3600.0)
    assert ask(lie, terms=Terms(rule)) == Grant(0, Refusal.PAGE)


def test_a_grant_holds_until_its_facts_are_void() -> None:
    flight = replace(IDLE, running=1, step_began=NOW, step_ends=NOW + 0.01, written=NOW)
    assert ask(flight).until == NOW + 0.01
    assert ask(flight, occupied_s=0.02).until == NOW + 0.01 + 0.02
    assert ask(replace(IDLE, written=NOW)).until == NOW + FACTS_S
    assert ask(replace(IDLE, written=NOW), terms=CPU).until == NOW + FACTS_S
    assert ask(IDLE).until == math.inf


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(KeyError, match="generous"):
        ask(IDLE, terms=Terms("generous"))


# ---- the bounds of serving's own steps


def test_one_step_clears_a_short_queue() -> None:
    one = bounds(Queue(4, 1, 50, 200), LATENCY, budget=256, tpot_s=0.1)
    assert one == (LATENCY.upper(Step(50, 5, 260)),) * 2


def test_an_empty_engine_needs_no_time() -> None:
    assert bounds(Queue(0, 0, 0, 0), LATENCY, budget=256, tpot_s=0.1) == (0.0, 0.0)


def test_a_long_queue_puts_running_requests_behind_with_every_step() -> None:
    queue = Queue(0, 1, 700, 0)
    keep, clear = bounds(queue, LATENCY, budget=101, tpot_s=0.1)
    seven = 7 * LATENCY.upper(Step(100, 1, 0))
    assert clear == pytest.approx(seven)
    assert keep == pytest.approx(seven - 6 * 0.1, rel=0.01)
    assert bounds(queue, LATENCY, budget=101, tpot_s=9.0)[0] == LATENCY.upper(Step(101, 1, 708))


@given(st.integers(0, 40), st.integers(0, 10), st.integers(0, 3000), st.integers(0, 9999))
def test_one_more_request_never_makes_it_faster(
    decode: int, starting: int, prefill: int, context: int
) -> None:
    queue = Queue(decode, starting, prefill, context)
    before = bounds(queue, LATENCY, 256, 0.1)
    after = bounds(queue.joined_by(100), LATENCY, 256, 0.1)
    assert before[0] <= after[0] + 1e-9
    assert before[1] <= after[1]
