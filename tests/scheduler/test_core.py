"""The core's smaller promises; the large ones are the simulation's."""

from __future__ import annotations

import pytest

from rose.scheduler.core import MOST_STARTS, Full, Rules, Scheduler, Start, Stop
from rose.scheduler.fleet import Engine
from rose.scheduler.job import Job
from rose.scheduler.turn import Ask, Chunk, Cut, Span, State, Turn, request


def ask(number: int, job: str = "a", **more: object) -> Ask:
    known = {"id": f"r{number}", "job": job, "prompt": [1, 2, 3], "max_tokens": 8, "seed": 5}
    return Ask(**known | more)  # type: ignore[arg-type]


def scheduler(*engines: str, rules: Rules | None = None, **jobs: Job) -> Scheduler:
    core = Scheduler(rules)
    core.jobs = jobs or {"a": Job("a")}
    for id_ in engines:
        core.join(Engine(id_, f"http://{id_}", version="0"), 0.0)
    return core


def starts(core: Scheduler, now: float = 0.0) -> list[tuple[str, str]]:
    return [(s.turn.ask.id, s.engine.id) for s in core.decide(now) if isinstance(s, Start)]


def test_a_turn_that_is_cut_goes_on_from_its_tokens() -> None:
    core = scheduler("e", "f")
    turn = core.submit(ask(1, sampling={"temperature": 0.5, "min_tokens": 4}), 0.0)
    ((_, where),) = starts(core)
    first = request(turn, "w0")
    core.arrived(turn, 0, Chunk([7, 8], [-1, -2]), 0.1)
    core.arrived(turn, 0, Chunk([], finish="abort"), 0.2)
    assert turn.state == State.QUEUED
    ((_, other),) = starts(core, 0.2)
    assert other != where
    again = request(turn, "w0")
    assert again["token_ids"] == [1, 2, 3, 7, 8]
    sampling = again["sampling_params"]
    assert (sampling["max_tokens"], sampling["min_tokens"]) == (6, 2)
    assert sampling["seed"] != first["sampling_params"]["seed"]
    core.engines[other].version = "4"
    core.arrived(turn, 1, Chunk([9], [-3], "stop", spans=[Span(0, "3")]), 0.3)
    assert (turn.state, turn.tokens, turn.logprobs) == (State.DONE, [7, 8, 9], [-1, -2, -3])
    assert [(span.start, span.version) for span in turn.spans] == [(0, "0"), (2, "3")]


def test_what_an_old_attempt_sends_is_not_taken() -> None:
    core = scheduler("e", "f")
    turn = core.submit(ask(1), 0.0)
    core.decide(0.0)
    core.cut(turn, 0, Cut.LOST, 0.1)
    core.decide(0.1)
    core.arrived(turn, 0, Chunk([9], finish="stop"), 0.2)
    core.cut(turn, 0, Cut.LOST, 0.2)
    assert (turn.tokens, turn.state, turn.attempt) == ([], State.PLACED, 1)


def test_a_cut_after_the_last_token_is_an_end() -> None:
    core = scheduler("e")
    turn = core.submit(ask(1, max_tokens=2), 0.0)
    core.decide(0.0)
    core.arrived(turn, 0, Chunk([4, 5]), 0.1)
    assert (turn.state, turn.finish) == (State.DONE, "length")


def test_a_stalled_engine_loses_its_turns_if_another_is_there() -> None:
    core = scheduler("e")
    turn = core.submit(ask(1), 0.0)
    core.decide(0.0)
    assert core.decide(10.0) == []
    core.join(Engine("f", "", version="0"), 10.0)
    stop, start = core.decide(11.0)
    assert isinstance(stop, Stop) and (stop.turn, stop.attempt) == (turn, 0)
    assert isinstance(start, Start) and start.engine.id == "f"
    assert core.cuts == {Cut.STALLED: 1}


def test_a_turn_behind_others_does_not_stall() -> None:
    core = scheduler("e", "f", rules=Rules(placement="sticky"))
    turns = [core.submit(ask(n, trajectory="t"), 0.0) for n in (1, 2)]
    where = {engine for _, engine in starts(core)}
    assert len(where) == 1
    for now in (1.0, 2.0, 3.0, 4.0):
        core.arrived(turns[0], 0, Chunk([1]), now)
        assert core.decide(now) == []


def test_jobs_share_by_their_shares() -> None:
    core = scheduler(a=Job("a", share=1.0), b=Job("b", share=3.0))
    for number in range(40):
        core.submit(ask(number, "a" if number % 2 else "b"), 0.0)
    core.join(Engine("e", "", version="0"), 0.0)
    placed = [core.turns[id_].ask.job for id_, _ in starts(core)][:16]
    assert placed.count("b") == 3 * placed.count("a")


def test_a_jobs_limits() -> None:
    core = scheduler("e", rules=Rules(most_waiting=3), a=Job("a", most_running=1))
    for number in range(3):
        core.submit(ask(number), 0.0)
    with pytest.raises(Full, match="job a has 3 turns waiting"):
        core.submit(ask(9), 0.0)
    assert len(starts(core)) == 1


def test_a_job_uses_no_more_borrowed_devices_than_it_may() -> None:
    core = scheduler("own", a=Job("a", max_borrowed=1), b=Job("b"))
    for id_ in ("x", "y", "z"):
        core.join(Engine(id_, "", borrowed=True, version="0"), 0.0)
    for number in range(40):
        core.submit(ask(number, "ab"[number % 2]), 0.0)
    starts(core)
    used = {
        job: {t.engine for t in core.turns.values() if t.ask.job == job and t.engine != "own"}
        for job in "ab"
    }
    assert len(used["a"]) == 1 < len(used["b"])


def test_samples_of_a_long_prompt_stay_together_and_those_of_a_short_one_do_not() -> None:
    for tokens, wanted in ((6000, 1), (3, 4)):
        core = scheduler("e", "f", "g", "h")
        for sample in range(8):
            core.submit(ask(sample, prompt=list(range(tokens)), group="one"), 0.0)
        assert len({engine for _, engine in starts(core)}) == wanted


def test_many_turns_are_placed_a_few_at_a_time() -> None:
    core = scheduler(*(f"e{i}" for i in range(4)))
    for number in range(MOST_STARTS + 10):
        core.submit(ask(number), 0.0)
    assert len(starts(core)) == MOST_STARTS
    assert core.unfinished
    assert len(starts(core)) == 10
    assert not core.unfinished


def test_a_turn_that_is_cancelled_is_stopped_where_it_is() -> None:
    core = scheduler("e")
    turn = core.submit(ask(1), 0.0)
    core.decide(0.0)
    core.cancel(turn, 0.1)
    ((stop,)) = core.decide(0.1)
    assert isinstance(stop, Stop) and stop.engine.id == "e"
    assert core.jobs["a"].running == 0 and not core.engines["e"].turns


def test_the_same_id_is_the_same_turn() -> None:
    core = scheduler("e")
    turn = core.submit(ask(1), 0.0)
    assert core.submit(ask(1, prompt=[9]), 0.0) is turn
    assert len(starts(core)) == 1


def test_an_engine_that_refuses_ends_the_turn() -> None:
    core = scheduler("e")
    turn = core.submit(ask(1), 0.0)
    core.decide(0.0)
    core.refuse(turn, 0, 400, "no such token", 0.1)
    assert (turn.state, turn.status, turn.error) == (State.ABORTED, 400, "no such token")
    assert core.jobs["a"].running == 0


def test_what_an_engine_had_cached_is_counted_though_it_says_so_last() -> None:
    core = scheduler("e")
    prompt = list(range(512))
    for number, cached in ((1, 0), (2, 512), (3, 0)):
        turn = core.submit(ask(number, prompt=prompt, max_tokens=1), 0.0)
        core.decide(0.0)
        core.arrived(turn, 0, Chunk([1], finish="stop"), 0.1)
        core.forget(turn)
        core.arrived(turn, 0, Chunk([], cached=cached), 0.2)
    assert (core.hits, core.looked) == (512, 3 * 512)


def test_a_turn_of_a_ledger_waits_from_now_on() -> None:
    core = scheduler("e")
    turn = Turn(ask(1), arrived=1e9)
    core.restore(turn, 5.0)
    assert (turn.arrived, turn.attempt) == (5.0, 1)
    assert starts(core, 5.0) == [("r1", "e")]


def test_turns_that_were_given_up_do_not_fill_the_queue() -> None:
    core = scheduler(rules=Rules(most_waiting=3))
    for number in range(50):
        core.cancel(core.submit(ask(number), 0.0), 0.0)
    assert len(core.jobs["a"].queue) < 50
    core.submit(ask(99), 0.0)
    core.join(Engine("e", "", version="0"), 1.0)
    assert starts(core, 1.0) == [("r99", "e")]
    assert core.jobs["a"].waiting == 0


# ---- freshness


def finish(core: Scheduler, id_: str, now: float) -> None:
    turn = core.turns[id_]
    core.arrived(turn, turn.attempt, Chunk([4], finish="stop"), now)
    core.forget(turn)


def test_an_engine_gets_no_turns_before_it_has_what_was_current_when_it_joined() -> None:
    core = scheduler("e")
    core.jobs["a"].lead(0)
    core.jobs["a"].lead(3)
    core.join(Engine("late", "", version=""), 1.0)
    core.engines["e"].active = False
    core.submit(ask(1), 1.0)
    assert starts(core, 1.0) == []
    core.engines["late"].version = "2"
    assert starts(core, 2.0) == []
    core.jobs["a"].lead(4)
    core.engines["late"].version = "3"
    assert starts(core, 3.0) == [("r1", "late")]


def test_engines_too_far_behind_get_nothing_new_of_the_job() -> None:
    core = scheduler("e", a=Job("a", max_staleness=1), b=Job("b"))
    for version in (0, 2):
        core.jobs["a"].lead(version)
    core.submit(ask(1), 0.0)
    core.submit(ask(2, "b"), 0.0)
    assert starts(core) == [("r2", "e")]
    core.engines["e"].version = "1"
    assert starts(core, 1.0) == [("r1", "e")]


def test_no_more_trajectories_begin_than_can_be_trained_on_fresh() -> None:
    core = scheduler("e", a=Job("a", max_staleness=1, per_version=2))
    core.jobs["a"].lead(5)
    core.engines["e"].version = "5"
    for number in range(6):
        core.submit(ask(number, trajectory=f"t{number}"), 0.0)
    assert [id_ for id_, _ in starts(core)] == ["r0", "r1", "r2", "r3"]
    assert list(core.jobs["a"].held) == ["r4", "r5"]
    finish(core, "r0", 1.0)
    core.submit(ask(10, trajectory="t0"), 1.0)
    core.cut(core.turns["r1"], 0, Cut.REVOKED, 1.0)
    begun = {id_ for id_, _ in starts(core, 2.0)}
    assert begun == {"r10", "r1"}  # neither is a new trajectory
    core.cancel(core.turns["r4"], 2.0)
    core.jobs["a"].lead(6)
    core.engines["e"].version = "6"
    assert [id_ for id_, _ in starts(core, 3.0)] == ["r5"]
    assert (core.jobs["a"].begun, core.jobs["a"].waiting) == (5, 0)


def test_held_turns_that_nobody_wants_any_more_are_not_kept() -> None:
    core = scheduler("e", a=Job("a", per_version=1))
    core.jobs["a"].lead(0)
    core.submit(ask(0), 0.0)
    for number in range(1, 1000):
        turn = core.submit(ask(number), 0.0)
        core.cancel(turn, 0.0)
        core.forget(turn)
    assert len(core.jobs["a"].held) < 50


def test_a_trajectory_that_begins_is_expected_to_be_as_long_as_the_jobs_others() -> None:
    core = scheduler("e")
    assert core.to_come(ask(0, trajectory="new")) == 0  # nothing is known yet
    for number in range(8):
        turn = core.submit(ask(number, trajectory=f"t{number % 2}"), 0.0)
        core.decide(0.0)
        core.arrived(turn, 0, Chunk([7], finish="stop"), 0.1)
    assert core.to_come(ask(8, trajectory="new")) == 3
    assert core.to_come(ask(8, trajectory="t0")) == 4  # those that live on have a heavy tail
    assert core.to_come(ask(8, trajectory="new", last=True)) == 0
