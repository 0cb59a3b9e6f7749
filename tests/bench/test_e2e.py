"""What `rose bench e2e` and the demo make of their runs; the runs themselves are made up here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rose.bench import demo, demo_report, e2e, report
from rose.bench.arena import Run, Traffic
from rose.bench.arrivals import Request
from rose.bench.cpu import Spent
from rose.bench.stats import Sample
from rose.cluster.config import ConfigError
from rose.executor.slo import Slo

SLO = Slo(0.2, 0.05)


def sample(index: int, ttft: float) -> Sample:
    times = tuple(index + ttft + 0.01 * i for i in range(4))
    return Sample(index, float(index), float(index), times[-1], 8, 4, times, "stop")


def run(mode: str, step_s: float, ttft: float, reward: float = 0.5, **more: Any) -> Run:
    steps = [
        {"step": i + 1, "episodes": 64, "groups_tried": 4, "turns": 7.5, "tokens": 700,
         "step_s": step_s, "sample_s": 0.7 * step_s,
         "learn_s": 0.2 * step_s, "sync_s": 0.5, "reward": reward, "wire_bytes": 1e6,
         "episodes_per_s": 64 / step_s, "at": 100.0 + (i + 1) * step_s}
        for i in range(3)
    ]  # fmt: skip
    cpu = Spent(3 * step_s, 6.0, {"dedicated": 30.0, "lent": 9.0}, 10.0, 60.0)
    return Run(mode, steps, [sample(i, ttft) for i in range(20)], cpu=cpu, **more)


def found() -> dict[str, Any]:
    runs = {
        "static": [run("static", 30.0, 0.1)],
        "elastic": [run("elastic", 28.0, 0.1)],
        "share_all": [run("share_all", 18.0, 0.3)],
        "rose": [run("rose", 20.0, 0.1, reward=0.6, activating_s=0.3), run("rose", 20.0, 0.1)],
    }
    return {"grpo": e2e.summary(runs, SLO)}


def test_ratios_are_of_whole_steps_and_serving() -> None:
    ratios = e2e.ratios(found())
    assert ratios["throughput_vs_static"] == pytest.approx(1.5)
    assert ratios["throughput_vs_elastic"] == pytest.approx(1.4)
    assert (ratios["slo_attainment"], ratios["share_all_slo_attainment"]) == (1.0, 0.0)
    assert ratios["serving_only_slo_attainment"] == 1.0
    assert ratios["reward_gap_vs_static"] == pytest.approx(0.05)
    assert ratios["allocation_overhead"] == pytest.approx(0.3 / 60 / 2)


def test_dapo_has_keys_of_its_own_and_serving_is_the_worst_of_both() -> None:
    both = found()
    late = {"static": [run("static", 30.0, 0.1)], "rose": [run("rose", 15.0, 0.25)]}
    both["dapo"] = e2e.summary(late, SLO)
    ratios = e2e.ratios(both)
    assert ratios["throughput_vs_static_dapo"] == pytest.approx(2.0)
    assert ratios["slo_attainment"] == 0.0


def test_the_host_is_what_neither_engines_nor_trainer_took() -> None:
    assert run("rose", 10.0, 0.1).cpu.host_cores == pytest.approx((60 - 6 - 10 - 39) / 30)


def test_a_run_can_be_played_again_from_what_is_told() -> None:
    lengths = [
        {"step": i, "groups": [["40 9 12 8"] * 16] * (4 + i), "useless": list(range(i))}
        for i in (1, 2, 3, 3)
    ]
    one = run("rose", 10.0, 0.1, seed=8, window=(12.0, 42.0), lengths=lengths)
    told = json.loads(json.dumps(e2e.summary({"rose": [one]}, SLO)))["runs"]["rose"]["each"][0]
    assert (told["seed"], told["window"]) == (8, [12.0, 42.0])
    assert told["cpu"]["rollout"] == {"dedicated": 30.0, "lent": 9.0}
    assert [len(step["groups"]) for step in told["steps"]] == [5, 6, 7]
    assert told["steps"][2]["useless"] == [0, 1, 2]
    assert told["steps"][0]["sample_s"] == pytest.approx(7.0)


def test_the_table_shows_every_mode() -> None:
    console = Console(width=120, record=True)
    report.e2e_table({"modes": found()}, console)
    shown = console.export_text()
    for mode in ("static", "elastic", "share_all", "rose"):
        assert mode in shown


@pytest.mark.parametrize(("field", "value"), [("modes", ("magic",)), ("algorithms", ("ppo",))])
def test_what_is_unknown_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=value[0]):
        e2e.Settings(**{field: value}).check()


def test_a_recorded_trace_keeps_its_shape_at_the_asked_rate() -> None:
    recorded = tuple(Request(t, 5, 5) for t in (0.0, 1.0, 1.1, 1.2, 9.0, 10.0))
    made = Traffic(rate=1.2, recorded=recorded).requests(100.0, seed=0)
    assert len(made) == 6
    assert [round(one.arrival_s, 3) for one in made] == [0.0, 0.5, 0.55, 0.6, 4.5, 5.0]
    drawn = Traffic(rate=2.0).requests(200.0, seed=1)
    assert len(drawn) == pytest.approx(400, rel=0.2)


def test_the_demos_verdict_follows_from_its_runs(tmp_path: Path) -> None:
    held = {"before": 0.3, "after": 0.8}
    static = run("static", 30.0, 0.1, evaluation=held)
    rose = run("rose", 20.0, 0.1, evaluation=held)
    facts = demo.Outcome(SLO, static, rose, 0.002).facts
    assert facts["throughput_vs_static"] == pytest.approx(1.5)
    assert facts["harvest"]["of_idle"] == pytest.approx(9.0 / 60.0 / (1 - 6.0 / 90.0))
    console = Console(width=100, record=True)
    assert demo._verdict(facts, console)
    shown = console.export_text()
    for part in ("1.50 times", "80%", "Serving kept its promise", "100.0%"):
        assert part in shown
    late = demo.Outcome(SLO, static, run("rose", 20.0, 0.3, evaluation=held), 0.002).facts
    assert not demo._verdict(late, Console(record=True))
    demo_report.draw(facts, {"static": static, "rose": rose}, SLO, tmp_path / "demo.png")
    page = demo_report.write(facts, tmp_path).read_text()
    assert "**1.50 times**" in page and "demo.png" in page
    assert json.dumps(facts)


def test_a_run_leaves_no_weights_behind_but_those_that_engines_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e2e, "COPIES", tmp_path / "copies")
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoint.pt").touch()
    for age, name in enumerate(("arena-new", "arena-old", "job-of-others")):
        folder = tmp_path / "copies" / name
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 - age, 1e9 - age))
    e2e._tidy(Run("rose", out=out))
    assert not list(out.iterdir())
    assert {one.name for one in (tmp_path / "copies").iterdir()} == {"arena-new", "job-of-others"}
