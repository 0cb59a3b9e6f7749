"""Arrivals that hurt: what they are made of, what is counted, and the worst ones replayed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rose.cli import app
from rose.executor.slo import Slo
from rose.plan.outcome import Outcome
from rose.plan.stress import cases
from rose.plan.stress.bed import bed
from rose.plan.stress.pattern import Moments, Pattern, arrivals, background, worst_prompt
from rose.plan.stress.report import PREEMPT_S, PREEMPTED, run
from rose.plan.stress.search import FAMILIES, nudged, search
from rose.plan.stress.trial import Bench, compare
from rose.plan.systems.rose import ROSE
from rose.plan.workload.traffic import Traffic

FILE = Path(__file__).with_name("stress.json")
"""Written by `rose plan stress --keep`; then the cases of an earlier search with what was seen
then, two of them with what is seen now: fewer late, first tokens 1 and 3 ms later."""
WHEN = Moments(0.0, 5.0, 20.0, 40.0, 60.0, 100.0)
BED = bed()
BURST = Pattern("test", "commit", 0.0, 2.0, 10, 0.0, 1.0, 1.0, 0.67, 0.0, seed=1)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(BED)


def test_a_burst_comes_when_and_where_it_is_told_to() -> None:
    parts = arrivals(BURST, WHEN, BED)
    assert [len(part) for part in parts] == [10, 10, 0]
    assert all(60.0 <= t <= 62.0 for part in parts for t in part.arrival_s)
    assert set(parts[0].prompt) == {worst_prompt(BED)}
    twice = arrivals(replace(BURST, at="steps", offset_s=-1.0), WHEN, BED)
    assert [np.sum(twice[0].arrival_s < 59.0), np.sum(twice[0].arrival_s >= 59.0)] == [10, 10]


def test_steepness_moves_a_burst_to_its_begin() -> None:
    even, steep = (arrivals(replace(BURST, steep=s), WHEN, BED)[0].arrival_s for s in (0.0, 1.0))
    assert np.mean(steep) < np.mean(even) - 0.4


def test_usual_traffic_is_the_same_beside_every_pattern() -> None:
    quiet = background(BED, 1.0, WHEN.end)
    for seed in (1, 2):
        beside = arrivals(replace(BURST, background=1.0, seed=seed), WHEN, BED)
        assert set(quiet[0].arrival_s) < set(beside[0].arrival_s)
        assert np.array_equal(quiet[2].arrival_s, beside[2].arrival_s)


@pytest.mark.parametrize("family", FAMILIES)
def test_patterns_are_drawn_and_nudged_within_reason(family: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        one = nudged(FAMILIES[family](rng), rng)
        assert one.family == family
        assert one.requests >= 1 and 0 <= one.steep <= 1 and one.lasting_s > 0


def compared(
    alone: list[float], lent: list[float], times: list[float], *, step_s: float = 0.03
) -> Any:
    """One device, first tokens only; the promise is 500 ms, 450 without its margin."""
    traffic = Traffic(np.array(times), np.full(len(times), 100), np.ones(len(times), int), 100.0)
    empty = Traffic(np.empty(0), np.empty(0, int), np.empty(0, int), 100.0)
    none = np.zeros(len(times))
    seen = Outcome("lent", ttft=np.array(lent), tpot=none, longest_s=step_s)
    quiet = Outcome("alone", ttft=np.array(alone), tpot=none)
    return compare(BED, (traffic, empty, empty), seen, quiet)


def test_what_is_counted() -> None:
    found = compared([0.1, 0.6, 0.48], [0.12, 0.6, 0.505], [0.0, 10.0, 20.0])
    assert (found.late_alone, found.late_lent, found.added_late) == (1, 2, 1)
    assert found.ttft_excess_s == pytest.approx(0.025)
    assert found.single == 3 and found.within == "yes"
    assert found.score(Slo(0.5, 0.15)) == pytest.approx(100 / 3 + 0.05)


def test_the_guarantee_is_the_promise_or_one_step() -> None:
    assert compared([0.1], [0.4], [0.0]).within == "yes"  # later than a step, but in time
    assert compared([0.43], [0.47], [0.0]).within == "BROKEN"
    crowd = compared([0.43, 0.43], [0.47, 0.47], [0.0, 0.1])
    assert crowd.single == 0 and crowd.within == "several unseen"


def test_who_waits_behind_a_crowd_is_not_beside_one_unseen_request() -> None:
    """Two come at once and keep the device busy until 9 s; who comes at 5 s waits for them, and
    who comes at 9.5 s for that one."""
    behind = compared([9.0, 9.0, 5.0, 0.5], [9.0, 9.0, 5.1, 0.6], [0.0, 0.0, 5.0, 9.5])
    assert behind.single == 0 and behind.within == "several unseen"
    after = compared([9.0, 9.0, 0.1], [9.0, 9.0, 0.1], [0.0, 0.0, 20.0])
    assert after.single == 1


def test_a_run_that_ends_too_early_is_refused() -> None:
    with pytest.raises(ValueError, match="rest_s"):
        compared([0.1], [0.1], [0.0, 1.0])


def test_requests_apart_keep_the_guarantee_with_preemption_too(bench: Bench) -> None:
    pattern = FAMILIES["one by one"](np.random.default_rng(3))
    hurt = bench.trial(pattern, ROSE)
    assert hurt.single > 0
    assert hurt.single_excess_s > 0.0
    assert hurt.single_beyond == hurt.added_late == 0
    preempted = bench.trial(pattern, PREEMPTED)
    assert preempted.single > 0
    assert preempted.ttft_excess_s == pytest.approx(preempted.step_s) == pytest.approx(PREEMPT_S)
    assert preempted.single_beyond == preempted.added_late == 0


def test_the_same_seed_finds_the_same(bench: Bench) -> None:
    first, again = (search(bench, ROSE, len(FAMILIES), 5) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("case", cases.read(FILE), ids=lambda case: str(case.pattern.family))
def test_the_worst_patterns_found_are_no_worse_now(bench: Bench, case: cases.Case) -> None:
    hurt = bench.trial(case.pattern, ROSE)
    assert hurt.single_beyond == 0
    assert hurt.added_late <= case.added_late
    assert hurt.ttft_excess_s <= case.ttft_excess_s + 1e-3
    assert hurt.tpot_excess_s <= case.tpot_excess_s + 1e-4


def test_the_command_searches_keeps_and_tells(tmp_path: Path) -> None:
    file, kept, page = (tmp_path / name for name in ("stress.json", "cases.json", "stress.html"))
    words = ["--tries", "7", "--json", str(file), "--keep", str(kept), "--html", str(page)]
    said = CliRunner().invoke(app, ["plan", "stress", *words])
    assert said.exit_code == 0, said.output
    assert "guaranteed" in said.output
    found = json.loads(file.read_text())
    assert set(found["modes"]) == set(FAMILIES)
    assert set(found["with_preemption"]) == set(FAMILIES)
    assert found["ratios"]["guarantee_held"]
    assert found["ratios"]["preemption_excess_max_s"] > 0.0
    assert {"rose", "rose_preemption", "rose_published", "share_all"} < set(
        found["modes"]["flash crowd"]
    )
    assert len(cases.read(kept)) == len(FAMILIES)
    text = page.read_text()
    assert text.count("<svg") == 2
    for part in (*FAMILIES, "guaranteed", "late through lending", "rose_preemption"):
        assert part in text, part


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stress", "--tries", "0"], "--tries"),
        (["stress", "/nowhere/fleet.toml"], "/nowhere/fleet.toml"),
        (["validate", "fleet.toml"], "only stress takes a second word"),
    ],
)
def test_bad_options_are_said_in_a_sentence(words: list[str], said: str) -> None:
    answer = CliRunner().invoke(app, ["plan", *words])
    assert answer.exit_code == 2
    assert said in answer.output
    assert "Traceback" not in answer.output


def test_nothing_lent_cannot_be_stressed() -> None:
    with pytest.raises(ValueError, match=r"devices\.lendable is 0"):
        run(replace(BED, lendable=0), 7, 0)
