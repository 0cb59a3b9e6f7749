import asyncio
from typing import Any

import pytest

from rose.bench.arrivals import Fixed
from rose.bench.load import LoadError, Refused
from rose.bench.rollouts import RolloutPlan, RolloutRecord, drive

PLAN = RolloutPlan(
    in_flight=2,
    turns=3,
    prompt_tokens=Fixed(6),
    turn_tokens=Fixed(8),
    observation_tokens=Fixed(3),
    temperature=0.0,
    trajectories=4,
)


def play(url: str, plan: RolloutPlan = PLAN, stop_after: float | None = None) -> RolloutRecord:
    async def go() -> RolloutRecord:
        stop = asyncio.Event()
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, stop.set)
        return await drive(url, plan, stop)

    return asyncio.run(go())


def outcome(record: RolloutRecord) -> list[tuple[int, tuple[int, ...]]]:
    return sorted((t.index, t.tokens) for t in record.finished)


def test_contract_trajectories_finish_with_growing_prompts(openai_url: str) -> None:
    record = play(openai_url)
    assert len(record.finished) == 4
    assert record.turns == 12
    assert record.tokens == 4 * 3 * 8
    assert (record.resumed_turns, record.aborts) == (0, {})
    for trajectory in record.finished:
        assert [len(turn) for turn in trajectory.turns] == [8, 8, 8]
        assert len(trajectory.tokens) == 6 + 3 * 8 + 2 * 3


def test_contract_greedy_rollouts_repeat(openai_url: str) -> None:
    assert outcome(play(openai_url)) == outcome(play(openai_url))


def test_interrupted_turns_go_on_token_exactly(fake_server: Any) -> None:
    undisturbed = outcome(play(fake_server.url))
    script = fake_server.Script
    fake_server.scripts = [
        script(abort_after=3, stop_reason="revoked"),
        script(),
        script(abort_after=0, stop_reason="reclaimed"),
        script(break_after=5),
        script(status=503),
        script(abort_after=2, stop_reason="revoked"),
        script(error_after=1),
    ]
    disturbed = play(fake_server.url)
    assert outcome(disturbed) == undisturbed
    assert disturbed.aborts == {"revoked": 2, "reclaimed": 1}
    assert sum(disturbed.broken.values()) == 3
    assert disturbed.resumed_turns >= 2
    assert disturbed.tokens == 4 * 3 * 8


def test_a_resumed_request_asks_only_for_the_rest(fake_server: Any) -> None:
    fake_server.scripts = [fake_server.Script(abort_after=3)]
    play(fake_server.url, RolloutPlan(1, 1, Fixed(6), Fixed(8), temperature=1.0, trajectories=1))
    first, second = fake_server.bodies
    assert second["prompt"][:6] == first["prompt"]
    assert second["prompt"][6:] == fake_server.greedy(first["prompt"], 3)
    assert (first["max_tokens"], second["max_tokens"]) == (8, 5)
    assert first["seed"] != second["seed"]


def test_stop_ends_an_endless_plan_and_its_retries(fake_server: Any) -> None:
    fake_server.scripts = [fake_server.Script(status=503)] * 10_000
    record = play(fake_server.url, RolloutPlan(in_flight=3), stop_after=0.3)
    assert record.finished == []
    assert record.broken["HTTP 503"] >= 3
    assert record.timeline(0.1)[-1] == 0.0


def test_tokens_per_second_over_time(fake_server: Any) -> None:
    fake_server.token_s = 0.005
    record = play(fake_server.url, stop_after=0.3)
    assert record.tokens > 0
    assert sum(record.timeline(0.1)) * 0.1 == pytest.approx(record.tokens)
    assert record.tokens_per_s() == pytest.approx(record.tokens / record.span_s)


def test_a_wrong_request_is_not_retried(fake_server: Any) -> None:
    fake_server.scripts = [fake_server.Script(status=400)]
    with pytest.raises(Refused, match="HTTP 400"):
        play(fake_server.url)


def test_a_server_without_token_ids_is_refused(fake_server: Any) -> None:
    fake_server.gives_ids = False
    with pytest.raises(LoadError, match="no token_ids"):
        play(fake_server.url)


def test_a_server_that_is_not_up_yet_is_waited_for() -> None:
    record = play("http://127.0.0.1:9", stop_after=0.1)
    assert record.broken == {"no model yet": 1}
