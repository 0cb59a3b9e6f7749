"""The keys that a result has, from runs that were made up."""

from __future__ import annotations

from typing import Any

import pytest

from rose.bench.colocated import Moment, Run, Workload
from rose.bench.hits import PrefixHits
from rose.bench.stats import Sample
from rose.bench.summary import line, ratios, summary
from rose.executor.facts import RolloutFacts, ServingFacts
from rose.executor.slo import Slo

SLO = Slo(1.0, 0.2)


def a_run(mode: str, found: int = 0, ttft_s: float = 0.5, surge_s: float = 0.5) -> Run:
    """Ten requests of two kinds, 1,000 tokens looked up."""
    rolls = mode not in ("serving_alone", "serving_again")
    serves = mode != "rollout_alone"
    first = [surge_s if index % 2 else ttft_s for index in range(10)]
    return Run(
        mode,
        seconds=10.0,
        samples=[
            Sample(index, index, index, index + at + 0.1, 8, 2, (index + at, index + at + 0.1))
            for index, at in enumerate(first if serves else [])
        ],
        kinds={index: "surge" if index % 2 else "base" for index in range(10 if serves else 0)},
        prefixes=PrefixHits(1000 if serves else 0, found),
        kv_total=100,
        rollout_tokens=500 if rolls else 0,
        serving_cpu=0.5 if serves else 0.0,
        moments=[
            Moment(
                at,
                ServingFacts(),
                RolloutFacts(
                    granted=int(50 + at), refused_decode=int(9 + at), kv_resident=40 if rolls else 0
                ),
            )
            for at in (-5.0, 0.0, 8.0)
        ],
    )


def part(found: dict[str, int], **times: Any) -> dict[str, Any]:
    runs = {"rollout_alone": [a_run("rollout_alone")]}
    runs |= {mode: [a_run(mode, hits, **times.get(mode, {}))] for mode, hits in found.items()}
    return summary(runs, SLO, Workload(1.0))


SHARED = {
    "serving_alone": 600,
    "serving_again": 590,
    "share_all": 90,
    "rose": 540,
    "rose_gate": 480,
}
UNSHARED = {"serving_alone": 20, "serving_again": 20, "share_all": 0, "rose": 0, "rose_gate": 0}


def test_prefix_hits_are_compared_with_serving_alone() -> None:
    shared = part(SHARED)
    assert shared["modes"]["rose"]["prefix_hit_rate"] == 0.54
    assert shared["modes"]["rollout_alone"]["prefix_hit_rate"] is None
    found = ratios({"shared_prefix": shared})
    assert found["prefix_hit_rate_alone"] == 0.6
    assert found["prefix_hits_vs_alone"] == pytest.approx(0.9)
    assert found["prefix_hits_vs_alone_gate"] == pytest.approx(0.8)
    assert found["share_all_prefix_hits_vs_alone"] == pytest.approx(0.15)
    assert found["prefix_hit_points_lost"] == pytest.approx(12.0)


def test_the_worst_scenario_counts_and_those_without_hits_do_not() -> None:
    some = {"serving_alone": 300, "rose": 150, "rose_gate": 300}
    scenarios = {"shared_prefix": part(SHARED), "long_prompts": part(some)}
    found = ratios({**scenarios, "pressure": part(UNSHARED), "orders": {"ratios": {"x": 1.0}}})
    assert found["prefix_hit_rate_alone"] == 0.6
    assert found["prefix_hits_vs_alone"] == pytest.approx(0.5)
    assert found["prefix_hits_vs_alone_gate"] == pytest.approx(0.8)
    assert found["prefix_hit_points_lost"] == pytest.approx(15.0)
    assert found["x"] == 1.0


def test_a_mode_that_finds_nothing_is_told_as_nothing() -> None:
    found = ratios({"shared_prefix": part({**SHARED, "rose": 0})})
    assert found["prefix_hits_vs_alone"] == 0.0
    assert found["prefix_hit_points_lost"] == pytest.approx(60.0)


def test_where_hardly_anything_is_found_points_count_and_no_ratio_of_rates() -> None:
    found = ratios({"pressure": part(UNSHARED)})
    assert found["prefix_hits_vs_alone"] == pytest.approx(0.98)
    assert found["serving_again_prefix_hits_vs_alone"] == 1.0
    assert found["prefix_hit_points_lost"] == pytest.approx(2.0)


def test_the_usual_keys_are_there_for_every_scenario() -> None:
    found = ratios({"pressure": part(UNSHARED, rose={"ttft_s": 0.6, "surge_s": 0.6})})
    assert found["ttft_p99_vs_alone"] == pytest.approx(1.2)
    assert found["tpot_p99_vs_alone"] == pytest.approx(1.0)
    assert found["slo_attainment"] == found["serving_alone_slo_attainment"] == 1.0
    assert found["harvest_efficiency"] == found["harvest_efficiency_gate"] == 2.0
    assert {"share_all_ttft_p99_vs_alone", "serving_again_tpot_p99_vs_alone"} <= set(found)


def test_kinds_of_requests_are_told_apart() -> None:
    modes = part(UNSHARED, rose={"surge_s": 1.5})["modes"]
    assert modes["rollout_alone"]["kinds"] == {}
    kinds = modes["rose"]["kinds"]
    assert (kinds["base"]["requests"], kinds["surge"]["requests"]) == (5, 5)
    assert (kinds["base"]["slo_attainment"], kinds["surge"]["slo_attainment"]) == (1.0, 0.0)
    assert kinds["base"]["ttft_p99_vs_alone"]["value"] == pytest.approx(1.0)
    assert kinds["surge"]["ttft_p99_vs_alone"]["value"] == pytest.approx(3.0)


def test_a_line_tells_the_hit_rate() -> None:
    assert "prefix hits 54%" in line(a_run("rose", 540), SLO)
    assert "prefix hits" not in line(a_run("rollout_alone"), SLO)


def test_what_rollouts_held_and_were_granted_is_that_of_the_window() -> None:
    rose = part(UNSHARED)["modes"]["rose"]
    assert rose["rollout_kv"] == 0.4
    assert rose["steps"]["granted"] == rose["steps"]["refused_decode"] == 8
    assert rose["steps"]["refused_busy"] == 0
