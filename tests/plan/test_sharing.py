"""How two engines share a device while both have work."""

from __future__ import annotations

import pytest
from tests.plan.simple import MODEL

from rose.executor.admission import Terms
from rose.executor.bounds import Queue, bounds
from rose.executor.slo import Slo
from rose.plan.engine import Engine, Job
from rose.plan.sharing import SHUT, Prompts, Shares, Sharing


def sharing(slo: Slo, error_budget: float = 0.0, preempt_s: float | None = None) -> Sharing:
    known = Prompts((100, 100, 100, 100, 100), 100, 1.0)
    terms = Terms("rose", preempt_s, error_budget)
    return Sharing(terms, slo, MODEL, MODEL, known, credit_s=2.0)


def shares(prompt: int, *, patient: bool = True) -> Shares:
    """One request decodes, one has a prompt in flight, one turn wants a step."""
    serving, rollout = Engine(MODEL), Engine(MODEL)
    for engine in (serving, rollout):
        engine.add(Job(1, 10, 10, 100))
        engine.plan()
        engine.done()
    if prompt:
        serving.add(Job(2, prompt, prompt, 10))
    return sharing(Slo(0.6, 0.2)).of(serving, rollout, due_s=0.6, allowance=0.0, patient=patient)


def test_a_rollout_step_is_one_beside_a_long_serving_step_too() -> None:
    decoding, long = shares(0), shares(600)
    assert decoding.tokens and long.tokens
    step_s = 0.01 + 0.0001 * min(600, MODEL.budget)
    length_s = 0.01 + 0.001 + 0.0001 * (long.tokens - 1)
    assert long.serving / long.rollout >= step_s / length_s
    assert long.serving > decoding.serving >= 0.5  # while both have a step, half is serving's


def test_nothing_is_lent_beside_serving_before_it_was_busy_for_a_while() -> None:
    assert shares(0, patient=False) == shares(400, patient=False) == SHUT


def test_an_idle_device_is_lent_alike_whoever_asked_before() -> None:
    tight = Slo(0.08, 0.2)
    idle, used = Engine(MODEL), sharing(tight, 0.005)
    found = set()
    for turns in (1, 5, 40, 400):
        rollout = Engine(MODEL)
        for id_ in range(turns):
            rollout.add(Job(id_, 10, 10, 100))
        rollout.plan()
        rollout.done()
        for allowance in (0.0, 0.1, 1.0):
            fresh = sharing(tight, 0.005)
            asked, alone = (
                one.of(idle, rollout, due_s=1.0, allowance=allowance, patient=False)
                for one in (used, fresh)
            )
            assert asked == alone
            found.add(asked)
    assert len(found) > 4


def turns(count: int) -> Engine:
    rollout = Engine(MODEL)
    for id_ in range(count):
        rollout.add(Job(id_, 10, 10, 100))
    while rollout.waiting:
        rollout.plan()
        rollout.done()
    return rollout


@pytest.mark.parametrize("preempt_s", [None, 0.001])
def test_a_step_on_an_idle_device_leaves_time_for_the_next_token_of_who_may_come(
    preempt_s: float | None,
) -> None:
    """Without preemption; with it the step may be as long as it likes."""
    slo = Slo(0.6, 0.06)
    one = sharing(slo, preempt_s=preempt_s)
    found = one.of(Engine(MODEL), turns(60), due_s=1.0, allowance=0.0, patient=False)
    next_s, _ = bounds(Queue(1, 0, 0, 100), MODEL.latency, MODEL.budget, slo.tpot_s)
    most = 1.1 * (0.01 + 0.001 * found.tokens)
    if preempt_s is None:
        assert 0 < most <= slo.tpot_s - next_s < most + 1.1 * 0.008  # tokens are found by eights
    else:
        assert most > slo.tpot_s - next_s


def test_a_step_leaves_time_to_give_memory_back_that_serving_lacks() -> None:
    """With preemption too: nobody overtakes a step that holds the memory."""
    for preempt_s in (None, 0.001):
        one = sharing(Slo(0.12, 0.2), preempt_s=preempt_s)
        enough, short = (
            one.of(Engine(MODEL), turns(60), due_s=1.0, allowance=0.0, patient=False, lacks=lacks)
            for lacks in (False, True)
        )
        assert enough.tokens >= short.tokens + 15 > 15
