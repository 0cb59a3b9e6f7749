"""How two engines share a device while both have work."""

from __future__ import annotations

from tests.plan.simple import MODEL

from rose.executor.admission import Terms
from rose.executor.slo import Slo
from rose.plan.engine import Engine, Job
from rose.plan.sharing import SHUT, Prompts, Shares, Sharing


def sharing(slo: Slo, error_budget: float = 0.0) -> Sharing:
    known = Prompts((100, 100, 100, 100, 100), 100, 1.0)
    terms = Terms("rose", error_budget=error_budget)
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
