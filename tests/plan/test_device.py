"""Two engines on one simulated device, against what can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.simple import MODEL

from rose.executor import memory, peak
from rose.executor.admission import Terms
from rose.executor.slo import Slo
from rose.plan.device import Device, Done
from rose.plan.engine import EngineModel, Job
from rose.plan.returning import Returning, Visits
from rose.plan.sharing import Prompts, Sharing

SLO = Slo(0.5, 0.1)
PREEMPTION = Terms("rose", preempt_s=0.001)
AT_ONCE = Terms("rose", preempt_s=0.0)
GATE = Terms("rose")
DECODE_S = 0.011
"""Of a step with one request, by `Line`."""


def device(
    terms: Terms,
    *,
    kv_total: int = 10_000_000,
    slowdown: float = 1.0,
    policy: str = "aimd",
    serving: EngineModel = MODEL,
) -> Device:
    prompts = Prompts((100, 100, 100, 100, 100), 100, 1.0)
    sharing = Sharing(terms, SLO, serving, MODEL, prompts, credit_s=2.0, slowdown=slowdown)
    made = Device(
        0, serving=serving, rollout=MODEL, kv_total=kv_total, sharing=sharing, policy=policy
    )
    made.wake()
    return made


def run(one: Device, until: float = math.inf) -> list[tuple[float, str, int]]:
    """All that ends by then, in order."""
    seen: list[tuple[float, str, int]] = []
    while (when := one.next()) <= until and when < math.inf:
        one.advance(when)
        seen += told(one.settle(when), when)
    if until < math.inf:
        one.advance(until)
    return seen


def told(done: Done, now: float) -> list[tuple[float, str, int]]:
    words = [("first" if e.first else "served", e.job.id) for e in done.served]
    words += [("turn", e.job.id) for e in done.rolled if not e.first]
    words += [("lost", job.id) for job, _ in done.lost]
    return [(now, word, id_) for word, id_ in words]


def request(id_: int, prompt: int = 100, new: int = 11) -> Job:
    return Job(id_, prompt, prompt, new)


def times(seen: list[tuple[float, str, int]], word: str) -> dict[int, float]:
    return {id_: at for at, said, id_ in seen if said == word}


@pytest.mark.parametrize("rule", ["rose", "idle_gate", "paper_slack", "share_all"])
def test_serving_alone_takes_what_its_steps_take(rule: str) -> None:
    one = device(Terms(rule))
    one.arrive(request(1), 0.0)
    one.settle(0.0)
    seen = run(one)
    assert times(seen, "first")[1] == pytest.approx(0.01 + 0.0001 * 100)
    assert times(seen, "served")[1] == pytest.approx(0.02 + 10 * DECODE_S)


def test_with_preemption_serving_waits_for_its_delay_once_and_rollout_has_the_rest() -> None:
    one = device(PREEMPTION)
    one.take(Job(7, 100, 100, 200))
    one.settle(0.0)
    seen = run(one, 0.5)
    one.arrive(request(1), 0.5)
    seen += told(one.settle(0.5), 0.5)
    seen += run(one)
    assert times(seen, "first")[1] == pytest.approx(0.5 + 0.001 + 0.02)
    assert times(seen, "served")[1] == pytest.approx(0.5 + 0.001 + 0.02 + 10 * DECODE_S)
    alone = 0.02 + 199 * DECODE_S
    assert times(seen, "turn")[7] == pytest.approx(alone + 0.001 + 0.02 + 10 * DECODE_S)
    assert one.longest_s == 0.001


def test_without_a_gate_both_have_half() -> None:
    one = device(Terms("share_all"), slowdown=1.25)
    one.take(Job(7, 100, 100, 200))
    one.arrive(request(1), 0.0)
    one.settle(0.0)
    seen = run(one)
    assert times(seen, "served")[1] == pytest.approx(2 * 1.25 * (0.02 + 10 * DECODE_S), rel=0.02)


def test_a_static_split_wastes_the_other_half() -> None:
    one = device(Terms("static_split"))
    one.take(Job(7, 100, 100, 50))
    one.settle(0.0)
    assert times(run(one), "turn")[7] == pytest.approx(2 * (0.02 + 49 * DECODE_S), rel=0.01)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(1, 100), st.integers(1, 30)), max_size=12),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 80)), min_size=1, max_size=8),
    st.sampled_from([GATE, PREEMPTION, AT_ONCE, Terms("idle_gate")]),
)
def test_nothing_is_lost_and_serving_is_never_held_up_for_longer_than_a_step(
    requests: list[tuple[float, int, int]], turns: list[tuple[int, int]], terms: Terms
) -> None:
    def served(*, beside: bool) -> tuple[dict[int, float], dict[int, float], int]:
        one = device(terms)
        for i, (prompt, new) in enumerate(turns if beside else []):
            one.take(Job(1000 + i, prompt, prompt, new))
        seen = told(one.settle(0.0), 0.0)
        for i, (at, prompt, new) in enumerate(sorted(requests)):
            seen += run(one, at)
            one.arrive(request(i, prompt, new), at)
            seen += told(one.settle(at), at)
        seen += run(one)
        return times(seen, "first"), times(seen, "served"), len(times(seen, "turn"))

    _, alone_end, _ = served(beside=False)
    first, end, done = served(beside=True)
    assert first.keys() == end.keys() == alone_end.keys() == set(range(len(requests)))
    assert done == len(turns)
    if terms is AT_ONCE:
        assert end == pytest.approx(alone_end)


def test_memory_goes_back_to_serving_and_turns_that_lose_theirs_are_told() -> None:
    one = device(PREEMPTION, kv_total=2_000_000)  # 2,000 tokens
    for i in range(10):
        one.take(Job(i, 100, 100, 400))
    seen = told(one.settle(0.0), 0.0) + run(one, 0.5)
    held = one.rollout.context * MODEL.kv_bytes
    assert 0 < held <= one.budget.bytes <= 1_600_000  # a fifth is serving's
    for i in range(3):
        one.arrive(request(100 + i, 400, 20), 0.5)
    seen += told(one.settle(0.5), 0.5)
    lost = times(seen, "lost")
    assert lost and set(lost) <= set(range(10))
    assert one.rollout.context * MODEL.kv_bytes <= one.budget.bytes <= 800_000
    seen += run(one)
    assert set(times(seen, "served")) == {100, 101, 102}


def test_memory_is_lacked_while_a_burst_like_the_last_one_would_not_find_it() -> None:
    one = device(PREEMPTION, kv_total=2_000_000)
    one.settle(0.0)
    assert not one.lacks(0.0)
    for i in range(3):
        one.arrive(request(i, 400, 20), 0.5)
    one.settle(0.5)
    assert not one.lacks(0.5)  # what was cut leaves headroom
    run(one, 2.0)
    for second in range(2, 61):
        one.settle(float(second))
    assert one.budget.bytes == 1_600_000 and one.lacks(60.0)
    assert not one.lacks(60.0 + 2 * peak.OVER_S)


def test_a_device_that_sleeps_hands_all_its_turns_back() -> None:
    one = device(GATE)
    for i in range(4):
        one.take(Job(i, 100, 100, 400))
    one.settle(0.0)
    run(one, 1.0)
    back = one.sleep()
    assert {job.id for job, _ in back} == {0, 1, 2, 3}
    assert all(0 < made < 400 for _, made in back)
    one.settle(1.0)
    assert one.next() == math.inf
    assert one.budget.bytes == 0


def test_lending_slack_waits_for_patience_and_keeps_the_pace() -> None:
    """Serving that is never idle lends in the end, and its tokens still come at the pace."""
    one = device(replace(GATE))
    one.take(Job(7, 10, 10, 300))
    one.arrive(request(1, 10, 500), 0.0)
    one.settle(0.0)
    seen = run(one)
    took = times(seen, "served")[1] - times(seen, "first")[1]
    assert took / 499 <= SLO.tpot_s
    assert times(seen, "turn")[7] < times(seen, "served")[1]


def test_steps_at_once_are_shared_by_halves_whatever_the_rule_lets_begin() -> None:
    """The paper's rule looks at no step's length; still serving has half while both run."""
    one = device(Terms("paper_slack"))
    for i in range(20):
        one.take(Job(100 + i, 10, 10, 300))
    one.arrive(request(1, 10, 50), 0.0)
    one.settle(0.0)
    seen = run(one, 10.0)
    took = times(seen, "served")[1] - times(seen, "first")[1]
    assert took == pytest.approx(2 * 49 * DECODE_S, rel=0.05)


@pytest.mark.parametrize(("terms", "share"), [(PREEMPTION, 1.0), (Terms("share_all"), 0.5)])
def test_the_host_shares_with_what_does_not_give_way(terms: Terms, share: float) -> None:
    one = device(terms)
    one.take(Job(7, 100, 100, 200))
    one.settle(0.0)
    assert one.runnable == (0 if share == 1.0 else 1)
    assert one.take_host(0.1) == pytest.approx(0.1 / share)
    assert times(run(one), "turn")[7] == pytest.approx(0.02 + 199 * DECODE_S + 0.1)


def test_work_of_the_host_waits_for_its_other_work_or_shares_with_it() -> None:
    one = device(PREEMPTION)
    one.take_host(1.0)
    assert one.take_host(0.1) == pytest.approx(1.1)
    assert one.take_host(0.1, fair=True) == pytest.approx(0.2)
    assert one.host == pytest.approx(1.2)


def test_serving_that_ends_beside_the_host_takes_twice_as_long() -> None:
    one = device(GATE)
    one.arrive(request(1), 0.0)
    one.settle(0.0)
    one.take_host(10.0)
    seen = run(one)
    assert times(seen, "served")[1] == pytest.approx(2 * (0.02 + 10 * DECODE_S))
    assert one.host == pytest.approx(10.0 - times(seen, "served")[1] / 2)


@pytest.mark.parametrize(("host_s", "times"), [(0.0, 1.5), (10.0, 2.5)])
def test_serving_shares_with_an_engine_that_starts_and_with_the_host(
    host_s: float, times: float
) -> None:
    """One that wants the device half of the time is half a rival."""
    one = device(GATE)
    one.stranger = 0.5
    one.arrive(request(1), 0.0)
    one.settle(0.0)
    one.take_host(host_s)
    assert run(one)[-1] == (pytest.approx(times * (0.02 + 10 * DECODE_S)), "served", 1)


def test_rollouts_that_give_way_go_on_where_an_engine_starts() -> None:
    one = device(PREEMPTION)
    one.stranger = 0.5
    one.take(Job(7, 100, 100, 200))
    one.settle(0.0)
    assert times(run(one), "turn")[7] == pytest.approx(0.02 + 199 * DECODE_S)


def test_a_token_is_sent_beside_rollouts_and_not_after_them() -> None:
    """Of a step 1 ms is the sender's: serving's other 10 wait for as many of rollouts."""
    one = device(Terms("share_all"), serving=replace(MODEL, sends_s=0.001))
    for i in range(20):
        one.take(Job(100 + i, 10, 10, 3000))
    one.arrive(request(1, 10, 501), 0.0)
    one.settle(0.0)
    seen = run(one, 20.0)
    took = (times(seen, "served")[1] - times(seen, "first")[1]) / 500
    assert took == pytest.approx(2 * 0.010 + 0.001, rel=0.02)


@settings(max_examples=60)
@given(
    st.sampled_from(memory.POLICIES),
    st.lists(
        st.tuples(st.sampled_from(["arrive", "sleep", "wake", "learn", "wait"]), st.floats(0, 2)),
        max_size=30,
    ),
)
def test_memory_is_what_the_policy_says_whenever_it_is_asked(
    policy: str, happens: list[tuple[str, float]]
) -> None:
    visits = Visits([index - 2 if index % 3 else -1 for index in range(40)], 0.9, [])
    terms = memory.MemoryTerms(2_000 * MODEL.kv_bytes, 0.2, policy, 2_000 * MODEL.kv_bytes)
    one = device(GATE, kv_total=terms.total, policy=policy)
    one.returning = Returning(visits, 2_000)
    asked, now = one.budget, 0.0

    def settle(now: float) -> None:
        nonlocal asked
        one.settle(now)
        assert one.serving is not None
        need = (one.serving.context + one.serving.prompts) * MODEL.kv_bytes
        assert one.returning is not None
        warm = one.returning.warm(now) * MODEL.kv_bytes
        demand = memory.Demand(one.active, need, rl_step=one.rl_step, serving_warm=warm)
        asked = memory.decide(asked, demand, terms, now)
        assert one.budget == asked

    for number, (what, seconds) in enumerate(happens):
        if what == "arrive":
            one.arrive(request(number, prompt=400), now)
        elif what == "sleep":
            one.sleep()
        elif what == "wake":
            one.wake()
        elif what == "learn":
            one.rl_step += 1
        settle(now)
        until = now + seconds
        while (now := min(one.next(), until)) < until:
            one.advance(now)
            settle(now)
        one.advance(until)
