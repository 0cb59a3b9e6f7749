"""How two engines share a device while both have work."""

from __future__ import annotations

from tests.plan.simple import MODEL

from rose.executor.admission import Terms
from rose.executor.slo import Slo
from rose.plan.engine import Engine, Job
from rose.plan.sharing import SHUT, Prompts, Shares, Sharing


def shares(prompt: int, *, patient: bool = True) -> Shares:
    """One request decodes, one has a prompt in flight, one turn wants a step."""
    serving, rollout = Engine(MODEL), Engine(MODEL)
    for engine in (serving, rollout):
        engine.add(Job(1, 10, 10, 100))
        engine.plan()
        engine.done()
    if prompt:
        serving.add(Job(2, prompt, prompt, 10))
    known = Prompts((100, 100, 100, 100, 100), 100, 1.0)
    sharing = Sharing(Terms("rose"), Slo(0.6, 0.2), MODEL, MODEL, known, credit_s=2.0)
    return sharing.of(serving, rollout, due_s=0.6, allowance=0.0, patient=patient)


def test_a_rollout_step_is_one_beside_a_long_serving_step_too() -> None:
    decoding, long = shares(0), shares(600)
    assert decoding.tokens and long.tokens
    step_s = 0.01 + 0.0001 * min(600, MODEL.budget)
    length_s = 0.01 + 0.001 + 0.0001 * (long.tokens - 1)
    assert long.serving / long.rollout >= step_s / length_s
    assert long.serving > decoding.serving >= 0.5  # while both have a step, half is serving's


def test_nothing_is_lent_beside_serving_before_it_was_busy_for_a_while() -> None:
    assert shares(0, patient=False) == shares(400, patient=False) == SHUT
