"""What `rose bench` says to settings that cannot be: one sentence, before anything starts."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rose.bench.bench_cli import app


@pytest.mark.parametrize("bench", ["executor", "transfer"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--device", "cpu:9999", "device 'cpu:9999'"),
        ("--device", "tpu:0", "tpu:0"),
        ("--model", "nowhere", "model: nowhere is not a model"),
    ],
)
def test_impossible_settings_are_named(bench: str, option: str, value: str, said: str) -> None:
    result = CliRunner().invoke(app, [bench, option, value])
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) <= 2, result.output
