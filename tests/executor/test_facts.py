"""What may stand on the page: a queue of hours is overload, not garbage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from rose.executor import admission
from rose.executor.admission import Question, Refusal, Terms
from rose.executor.facts import FACTS_S, MAX_SECONDS, ServingFacts
from rose.executor.page import Page

NOW = 100_000.0
FACTS = ServingFacts(written=NOW, ttft_s=1.0, tpot_s=0.1, kv_max=9)
SECONDS = sorted(name for name in ServingFacts.__struct_fields__ if name.endswith("_s"))


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("seconds", [MAX_SECONDS + 0.1, 86_400.0, 1e300, math.inf])
def test_a_prediction_of_hours_stays_readable(page: Page, name: str, seconds: float) -> None:
    facts = replace(FACTS, **{name: seconds})
    page.publish("serving", facts)
    assert page.serving() is None
    page.publish("serving", facts.capped())
    reading = page.lending(lambda: NOW)
    assert reading is not None
    assert getattr(reading.facts, name) == MAX_SECONDS


@given(st.fixed_dictionaries({name: st.floats(0, 1e9) for name in SECONDS}))
def test_only_what_is_beyond_is_capped(seconds: dict[str, float]) -> None:
    facts = replace(FACTS, **seconds, decode_deadline=1e9, step_ends=1e9)
    capped = facts.capped()
    for name, value in asdict(capped).items():
        assert value == (
            min(seconds[name], MAX_SECONDS) if name in seconds else asdict(facts)[name]
        )


def test_what_is_plausible_is_left_as_it_is() -> None:
    assert FACTS.capped() is FACTS


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_capping_hides_no_garbage(page: Page, wrong: float) -> None:
    page.publish("serving", replace(FACTS, clear_s=wrong).capped())
    assert page.serving() is None


@pytest.mark.parametrize("preempt_s", [None, 0.002])
def test_beside_a_queue_of_hours_nothing_is_granted(preempt_s: float | None) -> None:
    hours = replace(
        FACTS,
        waiting=9,
        prefill_deadline=NOW + 1.0,
        clear_s=7200.0,
        clear_with_new_s=7300.0,
        next_step_with_new_s=0.2,
    )
    for facts in (hours, replace(hours, waiting=0, prefill_deadline=math.inf)):
        window = admission.window(Question(facts.capped(), Terms(preempt_s=preempt_s), NOW))
        assert window.seconds == 0.0
        assert window.binding != Refusal.PAGE


@pytest.mark.parametrize(
    ("age", "fresh"),
    [(0.0, True), (FACTS_S, True), (FACTS_S + 0.01, False), (-0.01, False), (math.inf, False)],
)
def test_facts_are_fresh_for_a_while_and_not_before_their_time(age: float, fresh: bool) -> None:
    assert FACTS.fresh(NOW + age) is fresh


def test_facts_without_a_time_are_not_fresh() -> None:
    assert not replace(FACTS, written=0.0).fresh(NOW)
