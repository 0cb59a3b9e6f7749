"""Greedy answers equal those of stock engines, whatever is granted, taken back or interrupted."""

import random
import time
from typing import Any

import pytest

from rose.bench.arrivals import Fixed


@pytest.mark.parametrize(("role", "model"), [("serving", "tiny-a"), ("rollout", "tiny-b")])
def test_answers_are_those_of_a_stock_engine(
    active_node: Any, stock: Any, complete: Any, judge: Any, role: str, model: str
) -> None:
    reference = stock.result("stock")[model]
    url = getattr(active_node, f"{role}_url")
    answers = complete(url, model, reference["prompts"], len(reference["tokens"][0]))
    assert [a.tokens for a in answers] == reference["tokens"]
    assert {a.finish_reason for a in answers} == {"length"}
    # The judge, which the other tests trust, must agree with stock vLLM.
    for answer in answers:
        judge.accept(model, answer.prompt, answer.tokens)


def test_random_grants_random_memory_and_random_ends(stock: Any) -> None:
    """In one process: every step gets a random budget of tokens and blocks, some turns end."""
    reference = stock.result("stock")["tiny-b"]["tokens"]
    found = stock.result("random_grants")
    assert found["tokens"] == [reference] * len(found["tokens"])
    for whim in ("refused", "granted", "preempted", "ended"):
        assert found[whim] > 0, whim
    assert found["unplaced"] == 0  # every step of the first lease runs on the device's cores
    ends = [tuple(end) for ends in found["ends"] for end in ends]
    assert set(ends) == {("length", None), ("abort", "rose:reclaimed")}


def test_a_turn_that_can_never_run_is_ended_and_the_next_one_runs(stock: Any) -> None:
    large, small = stock.result("too_large")
    reference = stock.result("stock")["tiny-b"]["tokens"]
    assert large == ["abort", "rose:reclaimed", []]
    assert small == ["length", None, reference[0]]


def test_a_turn_begins_only_if_those_that_run_can_grow(stock: Any) -> None:
    """One that has to make room for another is computed anew."""
    found = stock.result("crowded")
    assert found["reasons"] == ["length"] * 16
    assert found["begun_beside"] and found["waited"]
    assert found["least_left"] >= 0


def test_serving_forgets_prefixes_that_are_reset(stock: Any) -> None:
    found = stock.result("forgets")
    assert found["before"] == [0, 256]
    assert found["kept"]
    assert found["reset"] and found["parked"] and found["parked_as_before"]
    assert found["forgotten"]
    assert found["after"] == 0


def test_a_revocation_does_not_wait_at_the_gate(stock: Any) -> None:
    found = stock.result("taken_back")
    assert found["reasons"] == ["rose:revoked"] * 4
    assert found["idle_waits"] == 0


def test_rollouts_beside_serving_that_comes_and_goes(
    active_node: Any, serving_load: Any, start_rollouts: Any
) -> None:
    with serving_load(active_node.serving_url):
        going = start_rollouts(
            active_node.rollout_url,
            in_flight=6,
            trajectories=12,
            turns=3,
            prompt_tokens=Fixed(80),
            turn_tokens=Fixed(60),
        )
        record = going.finish()
    assert record.turns == 36


def test_rollouts_through_revocations_drains_and_squeezes(
    active_node: Any, serving_load: Any, start_rollouts: Any, complete: Any, random_prompts: Any
) -> None:
    node = active_node
    rng = random.Random(3)
    going = start_rollouts(
        node.rollout_url,
        in_flight=12,
        trajectories=12,
        turns=3,
        prompt_tokens=Fixed(500),
        turn_tokens=Fixed(150),
    )
    with serving_load(node.serving_url, seed=1):
        for whim in range(8):
            time.sleep(rng.uniform(0.2, 0.8))
            if whim % 4 == 3:  # a jump of serving's KV demand far over the watermark
                asked = random_prompts(whim, 24, 1900)
                answers = complete(node.serving_url, "tiny-a", asked, 8)
                assert {a.finish_reason for a in answers} == {"length"}
            else:
                rng.choice((node.revoke, node.drain))()
                time.sleep(rng.uniform(0.0, 0.3))
                node.activate()
        record = going.finish()
    assert record.turns == 36
    assert record.resumed_turns > 0
    assert set(record.aborts) <= {"rose:revoked", "rose:reclaimed", "rose:dormant"}
    # vLLM streams nothing at all for a turn that ended before its first token.
    assert set(record.broken) <= {"stream ended early"}
