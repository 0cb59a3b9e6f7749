"""`rose plan validate`: the simulator finds itself, sees what was changed, refuses bad files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.plan.validation.made import e2e_result, executor_result, written
from typer.testing import CliRunner

from rose.cli import app
from rose.plan.validation.compared import Compared, chance, worst
from rose.plan.validation.e2e import e2e
from rose.plan.validation.executor import executor

CHANCE = 0.15
"""By which one play of so few requests may miss the middle of many."""
BENCHES: dict[str, tuple[Callable[[Path], list[Compared]], Callable[[Path], dict[str, Any]]]] = {
    "executor": (executor, executor_result),
    "e2e": (e2e, e2e_result),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def rose(*words: object) -> Any:
    return CliRunner().invoke(app, ["plan", "validate", *map(str, words)])


def modes(result: dict[str, Any]) -> dict[str, Any]:
    part = next(one for one in result["modes"].values() if one)
    found: dict[str, Any] = part.get("modes") or part["runs"]
    return found


@pytest.mark.parametrize("bench", BENCHES)
def test_the_simulator_finds_itself_and_sees_what_was_changed(bench: str, tmp_path: Path) -> None:
    play, make = BENCHES[bench]
    result = make(tmp_path)
    rows = play(written(tmp_path / "same.json", result))
    keys = {(row.mode, row.key) for row in rows}
    assert {("rose", "throughput"), ("rose", "ttft_p99"), ("share_all", "tpot_p99")} <= keys
    errors = worst(rows)
    assert errors["throughput_error_max"] < 0.05
    assert errors["p99_error_max"] < CHANCE
    assert all(row.simulated.low <= row.simulated.median <= row.simulated.high for row in rows)

    modes(result)["rose"]["ttft_s"]["p99"] *= 2
    changed = play(written(tmp_path / "changed.json", result))
    missed = {(row.mode, row.key) for row in changed if row.error > 0.3}
    assert missed == {("rose", "ttft_p99")}


def test_a_start_that_no_look_saw_hinders_nobody(tmp_path: Path) -> None:
    play, make = BENCHES["e2e"]
    result = make(tmp_path)
    for run in modes(result)["elastic"]["each"]:
        run["activating_s"] = 0.0
    rows = play(written(tmp_path / "instant.json", result))
    assert ("elastic", "tpot_p99") in {(row.mode, row.key) for row in rows}


def test_a_p99_of_few_requests_is_more_of_a_chance() -> None:
    values = np.random.default_rng(1).lognormal(0.0, 0.5, 2000)
    few, many = chance(values, 200), chance(values, 2000)
    assert 0.0 < many < few < 0.5
    assert chance(np.ones(50), 50) == 0.0


def test_the_command_takes_what_is_where_benchmarks_write(tmp_path: Path) -> None:
    (tmp_path / "bench-out").mkdir()
    written(tmp_path / "bench-out" / "e2e.json", e2e_result(tmp_path))
    said = rose("--json", "out.json")
    assert said.exit_code == 0, said.output
    found = json.loads(Path("out.json").read_text())
    assert {row["bench"] for row in found["modes"]} == {"e2e"}
    assert found["ratios"].keys() == {"throughput_error_max", "p99_error_max"}


def test_without_results_it_says_what_to_run() -> None:
    said = rose()
    assert said.exit_code == 2
    assert "rose bench executor" in said.output


@pytest.mark.parametrize("bench", BENCHES)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"bench": "sync"}', "no result of"),
        ("[]", "no result of"),
        ("BENCH", "measure it again"),
    ],
)
def test_a_bad_file_is_refused_by_name(
    bench: str, content: str | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content if content != "BENCH" else json.dumps({"bench": bench}))
    said = rose(f"--{bench}", path)
    flat = " ".join(said.output.split())
    assert said.exit_code == 2
    assert "bad.json" in flat and says in flat
    assert "Traceback" not in said.output


def test_a_model_without_a_profile_is_told_by_its_path(tmp_path: Path) -> None:
    path = written(tmp_path / "executor.json", executor_result(tmp_path))
    for profile in (tmp_path / "home" / "profiles").iterdir():
        profile.unlink()
    said = rose("--executor", path)
    assert said.exit_code == 2
    assert "latency profile" in said.output
