"""What a serving engine's requests need, read off what happened to them."""

import math

import pytest

from rose.executor.bounds import Queue
from rose.executor.lives import FIRST_PROMPT, PROMPTS_REMEMBERED, Arrivals, Lives, Prompts
from rose.executor.slo import Slo

PROMISE = Slo(1.0, 0.1)
LENDABLE = Slo(0.9, 0.09)


def test_nobody_here_needs_nothing() -> None:
    lives = Lives()
    assert lives.queue() == Queue(0, 0, 0, 0)
    assert lives.deadlines(LENDABLE, PROMISE, 0.0) == (math.inf, math.inf, math.inf)
    assert (len(lives), lives.started) == (0, 0)


def test_a_request_waits_starts_decodes_and_goes() -> None:
    lives = Lives()
    lives.arrived("a", 100, at=10.0)
    assert lives.queue() == Queue(0, 1, 100, 0)
    assert lives.deadlines(LENDABLE, PROMISE, 0.0).prefill == pytest.approx(10.9)
    assert lives.started == 0

    lives.stepped("a", computed=60, emitted=0, at=10.2)
    assert lives.queue() == Queue(0, 1, 40, 60)
    assert lives.started == 1

    lives.stepped("a", computed=100, emitted=1, at=10.4)
    assert lives.queue() == Queue(1, 0, 0, 100)
    assert lives.deadlines(LENDABLE, PROMISE, 5.0).decode == pytest.approx(10.4 + 0.09)

    lives.stepped("a", computed=101, emitted=2, at=10.41)
    due = lives.deadlines(LENDABLE, PROMISE, 5.0)
    assert due.decode == pytest.approx(10.4 + 2 * 0.09)  # it keeps the lead of its second token
    assert due.tight_decode == pytest.approx(10.41 + 0.1)
    assert due.prefill == math.inf

    lives.gone("a")
    lives.stepped("a", computed=102, emitted=3, at=10.5)
    assert lives.queue() == Queue(0, 0, 0, 0)


def test_a_request_that_lost_its_blocks_has_its_prompt_to_do_again() -> None:
    lives = Lives()
    lives.arrived("a", 100, at=0.0)
    lives.stepped("a", computed=80, emitted=0, at=0.1)
    lives.stepped("a", computed=30, emitted=0, at=0.2)
    assert lives.queue() == Queue(0, 1, 70, 30)


def test_the_tightest_request_decides() -> None:
    lives = Lives()
    lives.arrived("late", 10, at=5.0)
    lives.arrived("early", 10, at=3.0)
    assert lives.deadlines(LENDABLE, PROMISE, 0.0).prefill == pytest.approx(3.9)


def test_prompt_quantiles_are_of_recent_prompts() -> None:
    prompts = Prompts()
    assert prompts.quantile(0.99) == FIRST_PROMPT
    for tokens in range(1, 101):
        prompts.add(tokens)
    assert [prompts.quantile(share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    for _ in range(PROMPTS_REMEMBERED):
        prompts.add(7)
    assert prompts.quantile(1.0) == 7


def test_the_rate_follows_arrivals_and_their_absence() -> None:
    arrivals = Arrivals()
    assert arrivals.rate(0.0) == 0.0
    for second in range(100):
        arrivals.add(float(second))
    assert arrivals.count == 100
    assert arrivals.rate(99.0) == pytest.approx(1.0, rel=0.1)
    assert arrivals.rate(199.0) < 0.2
    for k in range(20):
        arrivals.add(200.0 + k / 10)
    assert arrivals.rate(201.9) == pytest.approx(10.0, rel=0.1)


def test_the_rate_follows_a_burst_after_a_few_arrivals() -> None:
    arrivals = Arrivals()
    for second in range(0, 100, 2):
        arrivals.add(second)
    assert arrivals.rate(99.0) == pytest.approx(0.5, rel=0.3)
    for k in range(5):
        arrivals.add(100 + k / 4)
    assert arrivals.rate(101.0) == pytest.approx(4.0)
    assert arrivals.rate(120.0) < 0.7
