"""Whenever admission grants a step, no serving deadline is missed. Proved on `admission.window`.

*One step.* The rule `rose`, without error budget, runs on unknown facts (see `symbolic`). For every
path of it that grants a step z3 looks for a course of events (see `timeline`) that breaks a
promise, and finds none.

*Any number of steps.* The gate uses a window of an idle serving engine for as many steps as begin
until it is void, and one beside requests once. By induction over what can happen while a window
stands (see `uses`), one step of them at most is in the way of a request that the facts do not know:
serving writes the arrivals word when it takes a request, and the gate compares it before each step.
The facts know all other requests, and steps that ended before they were written hold nobody up. So
what is proved of one step, begun at any time while the window stands, is true of all. Three steps
in a row are looked at in full as well.

Rules and gates with a bug are caught: for them z3 finds a course of events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import z3
from tests.proofs import timeline, uses
from tests.proofs.bugs import Bug, planted
from tests.proofs.symbolic import counterexample, highest, lowest
from tests.proofs.timeline import CASES, Case, Promise, course, grants, one_step, premises

from rose.executor import admission, gate

Made = Callable[[Case], Promise | None]
PROMISES: tuple[Made, ...] = (
    timeline.next_tokens,
    timeline.first_tokens,
    timeline.new_request,
    timeline.new_request_without_memory,
    timeline.second_tokens,
    timeline.second_token_of_new_request,
)


@pytest.fixture(autouse=True)
def _unknown_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "min", lowest, raising=False)
    monkeypatch.setattr(admission, "max", highest, raising=False)


def broken(promises: tuple[Made, ...] = PROMISES, cases: list[Case] = CASES) -> Iterator[str]:
    """Courses of events after a grant that break a promise, grants beside requests that are for
    more than one step, and grants while somebody waits for memory."""
    for case in cases:
        owed = [promise for made in promises if (promise := made(case)) is not None]
        for grant in grants(case):
            events = course(case, grant, one_step(grant))
            kept = [z3.Implies(given, at <= due) for at, due, given in owed]
            kept += [grant.once, z3.Not(timeline.waits_for_memory())] if case.flight else []
            if model := counterexample(z3.And(kept), premises(case), events):
                yield f"{case}: {model}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_no_granted_step_breaks_a_promise(case: Case) -> None:
    assert next(broken(cases=[case]), None) is None


def just_in_time(promise: Made, *, preempted: bool) -> bool:
    """Some granted step uses the promise up."""
    for case in CASES:
        if case.preempt == preempted and (owed := promise(case)) is not None:
            for grant in grants(case):
                events = course(case, grant, one_step(grant))
                exactly = z3.And(events, owed.given, owed.at == owed.due, timeline.took > 0)
                if counterexample(z3.Not(exactly), premises(case)):
                    return True
    return False


@pytest.mark.parametrize("promise", PROMISES)
def test_promises_are_not_kept_by_refusing(promise: Made) -> None:
    """A preemptible step is granted only beside an idle engine, which owes nothing yet."""
    assert just_in_time(promise, preempted=False)
    assert just_in_time(promise, preempted=True) == (promise in timeline.OF_A_NEW_REQUEST)


def test_a_step_begins_only_as_granted() -> None:
    assert next(uses.wrong_begins(), None) is None


def test_one_step_of_a_window_at_most_is_in_the_way() -> None:
    assert next(uses.too_many(), None) is None


def broken_by_several(count: int) -> Iterator[str]:
    """Courses of events after some steps on one window of an idle engine that break a promise."""
    for case in CASES:
        if case.flight:
            continue
        owed = [promise for made in PROMISES if (promise := made(case)) is not None]
        for grant in grants(case):
            events = course(case, grant, uses.several(grant, case, count))
            kept = [z3.Implies(given, at <= due) for at, due, given in owed]
            if model := counterexample(z3.And(kept), premises(case), events):
                yield f"{case}: {model}"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_row_of_steps_breaks_a_promise(count: int) -> None:
    assert next(broken_by_several(count), None) is None


BLIND_GATES = {
    "does not compare the arrivals": Bug("decided.arrivals == self._page.arrivals()", "True"),
    "forgets what the facts know": Bug("return window, facts.arrivals", "return window, None"),
    "passes what grew old": Bug("now > window.until or ", ""),
    "lends slack twice": Bug("(window.once and decided.steps != self.begun)", "False"),
    "lends slack that its own step takes": Bug("if window.once and begun != self._ended", "if 0"),
    "is open when serving is not seen": Bug(
        "return admission.shut(Refusal.PAGE), None", "return admission.OPEN, None"
    ),
}


@pytest.mark.parametrize("what", BLIND_GATES)
def test_a_gate_with_a_bug_is_caught(what: str) -> None:
    with planted(gate, BLIND_GATES[what]):
        assert next(uses.wrong_begins(), None) is not None


@pytest.mark.parametrize("what", ["does not compare the arrivals", "forgets what the facts know"])
def test_a_gate_that_does_not_look_who_comes_breaks_promises(what: str) -> None:
    with planted(gate, BLIND_GATES[what]):
        assert next(uses.too_many(), None) is not None
        assert next(broken_by_several(2), None) is not None


FORGOTTEN = {
    "the step in flight": Bug("in_flight = max(0.0, q.flight_ends - q.now)", "in_flight = 0.0"),
    "the step in flight, for tokens": Bug(
        "decode_deadline - q.now - in_flight", "decode_deadline - q.now"
    ),
    "the step in flight, for prompts": Bug(
        "facts.prefill_deadline - q.now - in_flight", "facts.prefill_deadline - q.now"
    ),
    "what rollout took of it": Bug(
        "self.facts.step_ends + self.occupied_s if", "self.facts.step_ends if"
    ),
    "that it is overdue": Bug(" or q.now > q.flight_ends)", ")"),
    "that it ends": Bug("until = min(until, q.flight_ends)", "pass"),
    "that facts grow old": Bug("written + FACTS_S if written else math.inf", "math.inf"),
    "who is unseen": Bug(
        "facts.ttft_s - room.unseen - facts.clear_with", "facts.ttft_s - facts.clear_with"
    ),
    "who came since it began": Bug("max(unseen, q.now - facts.step_began + in_flight)", "unseen"),
    "who misses the next step": Bug("unseen = 0.0, facts.next_step_s", "unseen = 0.0, 0.0"),
    "that a new one must be read": Bug(
        "room.unseen - facts.clear_with_new_s", "room.unseen - facts.clear_s"
    ),
    "that a new one delays tokens": Bug(
        "room.token - facts.next_step_with_new_s", "room.token - facts.next_step_s"
    ),
    "that a new one delays others": Bug(
        "room.first - facts.clear_with_new_s", "room.first - facts.clear_s"
    ),
    "who has no lead": Bug("token = min(token, facts.tpot_s)", "pass"),
    "all but the loosest": Bug("binding = min(slack", "binding = max(slack"),
    "that a new one decodes": Bug(
        "min(\n            room.token - facts.next_step_with_new_s, "
        "facts.tpot_s - facts.next_step_after_new_s\n        )",
        "room.token - facts.next_step_with_new_s",
    ),
    "how much a new one decodes": Bug(
        "facts.tpot_s - facts.next_step_after_new_s", "facts.tpot_s - facts.next_step_s"
    ),
    "that memory may lack": Bug("if facts.kv_lacks else math.inf", "if False else math.inf"),
    "that memory may lack, without preemption": Bug("if memory < slack[binding]:", "if False:"),
    "that memory may lack, with preemption": Bug(
        "Window(max(0.0, memory), q.fresh_until", "Window(math.inf, q.fresh_until"
    ),
    "that memory comes back later": Bug("arrival - q.give_back_s if", "arrival if"),
    "who waits for memory": Bug("if facts.waiting and facts.kv_need > facts.kv_quota", "if False"),
    "the preemption delay": Bug("if slack[binding] < q.terms.preempt_s", "if slack[binding] < 0.0"),
    "that slack is lent once": Bug("until, facts.busy, binding", "until, False, binding"),
    "a millisecond": Bug("max(0.0, slack[binding])", "max(0.0, slack[binding] + 0.001)"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_rule_that_forgets_something_is_caught(what: str) -> None:
    with planted(admission, FORGOTTEN[what]):
        assert next(broken(), None) is not None
