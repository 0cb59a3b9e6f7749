"""Many steps at once are the same steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.simple import MODEL

from rose.plan.engine import Engine, Job

jobs = st.lists(
    st.tuples(st.integers(1, 900), st.integers(0, 500), st.integers(1, 40)), min_size=1, max_size=12
)


def job(id_: int, prompt: int, cached: int, new: int) -> Job:
    return Job(id_, prompt, prompt + cached, new)


def played(wanted: list[Job], arrivals: list[float], *, one_by_one: bool) -> dict[int, list[float]]:
    """When each job had its first token and its end, alone on a device."""
    engine, now = Engine(MODEL), 0.0
    coming = sorted(zip(arrivals, wanted, strict=True), key=lambda entry: entry[0])
    times: dict[int, list[float]] = {}
    while coming or engine.busy:
        if not engine.steps and engine.busy:
            engine.plan()
            if one_by_one and engine.steps > 1:
                engine.work, engine.steps = engine.unit, 1
        ends = now + engine.work if engine.steps else math.inf
        if coming and coming[0][0] < ends:
            at, new = coming.pop(0)
            if engine.steps:
                engine.work -= at - now
                engine.cut()
            now = at
            engine.add(new)
            continue
        now = ends
        for event in engine.done():
            times.setdefault(event.job.id, []).append(now)
        engine.steps = 0
    assert (engine.context, engine.prompts) == (0, 0)
    return times


@given(jobs, st.lists(st.floats(0.0, 2.0), min_size=12, max_size=12))
def test_steps_that_are_alike_may_be_taken_together(
    sizes: list[tuple[int, int, int]], arrivals: list[float]
) -> None:
    wanted = [job(i, *size) for i, size in enumerate(sizes)]
    times = arrivals[: len(wanted)]
    single, many = (played(wanted, times, one_by_one=way) for way in (True, False))
    assert single.keys() == many.keys() == {one.id for one in wanted}
    for id_, (first, end) in single.items():
        assert many[id_] == pytest.approx([first, end], abs=1e-6)


def test_a_prompt_longer_than_a_step_takes_several_and_those_running_go_on() -> None:
    engine = Engine(MODEL)
    engine.add(job(0, 10, 0, 100))
    engine.plan()
    engine.done()
    engine.add(job(1, 1000, 0, 5))
    chunks = []
    for _ in range(3):
        engine.plan()
        chunks.append((engine.chunk, engine.steps, len(engine.ending)))
        engine.done()
    assert chunks == [(511, 1, 1), (489, 1, 1), (0, 4, 2)]


def test_fewer_tokens_than_turns_are_as_many_steps_as_it_takes() -> None:
    engine = Engine(MODEL)
    for i in range(8):
        engine.add(job(i, 1, 0, 10))
    engine.plan()
    engine.done()
    engine.plan(most=4)
    halves = engine.unit
    engine.plan()
    assert halves == pytest.approx(2 * (0.01 + 4 * 0.001))
    assert engine.unit == pytest.approx(0.01 + 8 * 0.001)


def test_jobs_that_are_taken_away_leave_nothing_behind() -> None:
    engine = Engine(MODEL)
    for i in range(4):
        engine.add(job(i, 100, 50, 10))
    engine.plan(most=250)
    engine.done()
    engine.plan(most=110)
    engine.done()
    gone = dict(engine.remove({0, 3}))
    assert {one.id: made for one, made in gone.items()} == {0: 2, 3: 0}
    rest = dict(engine.remove({1, 2}))
    assert {one.id: made for one, made in rest.items()} == {1: 2, 2: 1}
    assert (engine.context, engine.prompts, engine.busy) == (0, 0, False)


def test_no_more_run_at_once_than_there_are_places() -> None:
    engine = Engine(replace(MODEL, sequences=3))
    for i in range(8):
        engine.add(job(i, 10, 0, 4))
    running, ended = [], 0
    while engine.busy:
        engine.plan()
        ended += sum(not event.first for event in engine.done())
        engine.steps = 0
        running.append(len(engine.ending))
    assert (max(running), ended) == (3, 8)
