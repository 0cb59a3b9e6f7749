import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rose.bench.load_cli import load

app = typer.Typer()
app.command()(load)
QUICK = ["--rate", "50", "--duration", "0.2", "--prompt-tokens", "8", "--output-tokens", "3"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("pattern", ["poisson", "bursty", "gamma"])
def test_a_run_ends_with_a_table(fake_server: Any, pattern: str) -> None:
    result = invoke("--url", fake_server.url, *QUICK, "--pattern", pattern, "--seed", "3")
    assert result.exit_code == 0, result.output
    assert "TTFT ms" in result.stdout
    assert "p99 is the worst of only" in result.stdout


def test_json_summary_and_request_lines(fake_server: Any, tmp_path: Path) -> None:
    out = tmp_path / "requests.jsonl"
    result = invoke("--url", fake_server.url, *QUICK, "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["requests"] == len(out.read_text().splitlines()) > 0
    assert summary["ttft"]["p99_is_worst_of"] == summary["requests"]


def test_a_trace_is_replayed_with_caps(fake_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "\n".join(f"{i * 10},{100 + i},50" for i in range(20))
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    result = invoke(
        "--url", fake_server.url, "--trace", str(path), "--rate", "20", "--duration", "0.5",
        "--prompt-tokens", "9", "--output-tokens", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert len(fake_server.bodies) == 10
    assert {(len(b["prompt"]), b["max_tokens"]) for b in fake_server.bodies} == {(9, 2)}


def test_a_server_that_answers_nothing_is_exit_1(fake_server: Any) -> None:
    fake_server.scripts = [fake_server.Script(status=500)] * 1000
    result = invoke("--url", fake_server.url, *QUICK)
    assert result.exit_code == 1
    assert "HTTP 500: scripted" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--duration", "-1"], "--duration"),
        (["--peak", "0.5"], "--peak"),
        (["--slo-ttft-ms", "0"], "--slo-ttft-ms"),
        (["--prompt-tokens", "few"], "--prompt-tokens"),
        (["--vocab", "9:3"], "--vocab"),
        (["--seed", "-1"], "--seed"),
        (["--pattern", "trace"], "--trace"),
        (["--trace", "missing.csv"], "missing.csv"),
        (["--out", "no/such/folder/x"], "--out"),
        (["--rate", "1e9", "--duration", "1e9"], "--rate"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: list[str], names: str) -> None:
    result = invoke("--url", "http://127.0.0.1:9", *arguments)
    assert result.exit_code == 2
    assert names in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_bad_urls_and_absent_servers_are_one_sentence() -> None:
    for url in ("localhost:8000", "http://127.0.0.1:9", "http://[", "ftp://x"):
        result = invoke("--url", url, *QUICK)
        assert result.exit_code == 2
        assert url in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_bad_rows_stop_unless_skipped(fake_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,2\n0.1,oops,2\n0.2,8,2\n")
    refused = invoke("--url", fake_server.url, "--trace", str(path))
    assert refused.exit_code == 2
    assert f"{path}:3" in refused.stderr
    assert invoke("--url", fake_server.url, "--trace", str(path), "--skip-bad-rows").exit_code == 0
