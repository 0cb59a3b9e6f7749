"""Whenever admission grants a step, no serving deadline is missed. Proved on `admission.window`.

The rule `rose`, without error budget, runs on unknown facts (see `symbolic`). For every path of it
that grants a step z3 looks for a course of events (see `timeline`) that breaks a promise, and finds
none. Rules with a bug are caught: for them it finds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import z3
from tests.proofs import timeline
from tests.proofs.bugs import Bug, planted
from tests.proofs.symbolic import counterexample
from tests.proofs.timeline import CASES, Case, Promise, course, grants, premises

from rose.executor import admission

Made = Callable[[Case], Promise | None]
PROMISES: tuple[Made, ...] = (
    timeline.next_tokens,
    timeline.first_tokens,
    timeline.new_request,
    timeline.second_tokens,
)


def broken(
    promises: tuple[Made, ...] = PROMISES, cases: list[Case] = CASES, *, only_fresh: bool = False
) -> Iterator[str]:
    """Courses of events after a grant that break a promise, or a grant beside requests that is for
    more than one step."""
    for case in cases:
        owed = [promise for made in promises if (promise := made(case)) is not None]
        for grant in grants(case):
            events = course(case, grant, only_fresh=only_fresh)
            kept = [z3.Implies(given, at <= due) for at, due, given in owed]
            kept += [grant.once] if case.flight else []
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
                events = course(case, grant, only_fresh=False)
                exactly = z3.And(events, owed.given, owed.at == owed.due, timeline.took > 0)
                if counterexample(z3.Not(exactly), premises(case)):
                    return True
    return False


@pytest.mark.parametrize("promise", PROMISES)
def test_promises_are_not_kept_by_refusing(promise: Made) -> None:
    """A preemptible step is granted only beside an idle engine, which owes nothing yet."""
    assert just_in_time(promise, preempted=False)
    assert just_in_time(promise, preempted=True) == (promise is timeline.new_request)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="(4) is asked only if the facts know a waiting request",
)
def test_a_new_request_served_before_the_rollout_step_keeps_its_pace() -> None:
    """Facts without waiting requests; a new one comes, serving's next step takes it and gives it
    its first token; the rollout step, granted before, is behind that one and holds up the next."""
    assert next(broken((timeline.second_token_of_new_request,)), None) is None


def test_no_step_begins_on_facts_too_old_to_be_believed() -> None:
    assert next(broken(only_fresh=True), None) is None


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
    "that facts grow old": Bug("written + STALE_S if written else math.inf", "math.inf"),
    "who is unseen": Bug("facts.ttft_s - room.unseen - facts", "facts.ttft_s - facts"),
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
    "the preemption delay": Bug("slack[binding] >= q.terms.preempt_s", "slack[binding] >= 0.0"),
    "that slack is lent once": Bug("until, facts.busy, binding", "until, False, binding"),
    "a millisecond": Bug("max(0.0, slack[binding])", "max(0.0, slack[binding] + 0.001)"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_rule_that_forgets_something_is_caught(what: str) -> None:
    with planted(admission, FORGOTTEN[what]):
        assert next(broken(), None) is not None
