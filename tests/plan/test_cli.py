"""`rose plan` as people use it: a small fleet, a preset's shape, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rose.cli import app

FLEET = {
    "": {"name": "small", "steps": 1},
    "devices": {"gpu": "H100", "dedicated": 2, "lendable": 4, "trainers": 2},
    "serving": {"model": "Qwen2.5-7B", "ttft_ms": 500, "tpot_ms": 150, "rate": 1.0},
    "job": {"model": "Qwen3-8B", "rollouts": "frozen_lake", "prompts": 2, "samples": 8,
            "train_s": 30},
}  # fmt: skip


def written(path: Path, **changes: dict[str, Any]) -> Path:
    lines = []
    for name, table in FLEET.items():
        values = table | changes.get(name or "top", {})
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value != ""]
    path.write_text("\n".join(lines) + "\n")
    return path


def rose(*words: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_a_fleet_is_planned_as_table_json_and_page(tmp_path: Path) -> None:
    file, page = tmp_path / "out" / "plan.json", tmp_path / "out" / "plan.html"
    said = rose(written(tmp_path / "fleet.toml"), "--json", file, "--html", page)
    assert said.exit_code == 0, said.output
    assert "borrow at most" in said.output
    found = json.loads(file.read_text())
    assert set(found["modes"]) == {
        "fixed", "fixed_async", "spot", "serverless", "hybrid", "share_all", "static_split",
        "rose_published", "rose",
    }  # fmt: skip
    assert found["ratios"]["throughput_vs_fixed_fixed"] == 1.0
    assert found["ratios"]["throughput_vs_fixed_rose"] > 1.0
    assert found["modes"]["rose"]["prefix_hit_rate"] is None
    assert set(found["sensitivity"]) == {"as it is", "traffic doubles", "tools take twice as long",
                                         "links 10 times slower"}  # fmt: skip
    assert all(cost > 0 for cost in found["modes"]["rose"]["money"].values())
    text = page.read_text()
    assert text.count("<svg") == 4
    for part in (
        "How long a step takes",
        "Devices lent over time",
        "weight sync",
        "What if",
        "How much headroom",
        "headroom of",
        "harvest",
        "P99 TTFT",
        "slo_penalty",
    ):
        assert part in text, part
    parts = found["modes"]["rose"]["opportunistic_parts"]
    assert parts["headroom"] > 0.0
    assert found["modes"]["spot"]["opportunistic_parts"]["headroom"] == 0.0
    assert sum(parts.values()) == found["modes"]["rose"]["money"]["step_opportunistic"]
    assert "http://" not in text.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")


def test_a_plan_tells_which_prefixes_lending_leaves(tmp_path: Path) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    prefixes = {"prefix_hit_rate": 0.5, "prefix_return_s": 30}
    fleet = written(tmp_path / "fleet.toml", serving=prefixes)
    said = rose(fleet, "--json", file, "--html", page)
    assert said.exit_code == 0, said.output
    assert "prefix hits alone" in page.read_text() and "prefix" in said.output
    modes = json.loads(file.read_text())["modes"]
    assert modes["fixed"]["prefix_hit_rate"] is None
    assert 0.4 < modes["rose"]["prefix_hit_rate"] <= modes["rose"]["prefix_hit_rate_alone"] < 0.6


def test_steps_that_are_counted_too_early_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.plan.training.MOST_WARM", 1)
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    fleet = written(tmp_path / "fleet.toml", job={"rollouts": "agentic", "train_s": 1})
    said = rose(fleet, "--json", file, "--html", page)
    assert "likely too fast" in said.output
    assert "likely too fast" in page.read_text()
    modes = json.loads(file.read_text())["modes"]
    assert [name for name, one in modes.items() if not one["steady"]] == ["fixed_async"]


def test_a_plan_of_dapo_covers_the_run(tmp_path: Path) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    dapo = {"algorithm": "dapo", "kept": [1.0, 0.25]}
    fleet = written(tmp_path / "fleet.toml", job=dapo, top={"steps": 3})
    said = rose(fleet, "--json", file, "--html", page)
    assert said.exit_code == 0, said.output
    modes = json.loads(file.read_text())["modes"]
    assert modes["fixed"]["batches"][0] == 1.0
    assert modes["fixed"]["batches"][2] > 2.0
    assert "batches sampled" in page.read_text()
    assert max(modes["fixed_async"]["batches"]) > 1.5


def test_the_same_file_gives_the_same_plan(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.json" for i in range(2)]
    for file in files:
        assert rose(written(tmp_path / "fleet.toml"), "--json", file).exit_code == 0
    assert files[0].read_text() == files[1].read_text()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": {"gpu": "H9000"}}, "GPU H9000 is not known"),
        ({"serving": {"model": "Gwen"}}, "Gwen"),
        ({"serving": {"rate": -1.0}}, "serving.rate"),
        ({"serving": {"load": 0.2}}, "give either rate or load"),
        ({"serving": {"prefix_hit_rate": 1.0}}, "serving.prefix_hit_rate"),
        ({"serving": {"prefix_return_s": 0}}, "serving.prefix_return_s"),
        ({"serving": {"traffic": "nobody"}}, "traffic is 'nobody'"),
        ({"job": {"rollouts": "chess"}}, "rollouts is 'chess'"),
        ({"job": {"models": "x"}}, "job.models"),
        ({"job": {"in_flight": 0}}, "job.in_flight"),
        ({"job": {"algorithm": "dapo"}}, "DAPO needs 2"),
        ({"job": {"algorithm": "dapo", "kept": [0.6, 0.0]}, "top": {"steps": 2}}, "job.kept.1"),
        ({"job": {"model": "Llama-3-70B"}}, "does not fit"),
        ({"devices": {"dedicated": 0}}, "devices.dedicated"),
        ({"serving": {"trace": "/nowhere/trace.csv"}}, "/nowhere/trace.csv"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    answer = rose(written(tmp_path / "fleet.toml", **changes))
    assert answer.exit_code == 2
    assert said in answer.output
    assert "Traceback" not in answer.output


def test_a_broken_trace_is_named_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    answer = rose(written(tmp_path / "fleet.toml", serving={"trace": str(trace)}))
    assert answer.exit_code == 2
    assert "trace.csv:3" in answer.output


@pytest.mark.parametrize("words", [[], ["--preset", "paper-9b"], ["x.toml", "--preset", "y"]])
def test_one_of_file_and_preset(words: list[str]) -> None:
    answer = rose(*words)
    assert answer.exit_code == 2
