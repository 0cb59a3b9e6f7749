"""The ladders of `rose plan speed`; how fast the machine is, is nobody's test."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.test_fleet import scenario

from rose.plan.speed import Rung, draw, exponent, measure, result, scaled


def rungs(power: float) -> list[Rung]:
    return [Rung(n, 16 * n, 1e-3 * n**power, 100 * n, 50.0) for n in (80, 320, 1280)]


def test_a_fleet_is_scaled_with_its_parts() -> None:
    one = scaled(scenario(), 40, 64)
    assert (one.dedicated, one.lendable, one.steps) == (10, 30, 1)
    assert one.job.demand.prompts * one.job.demand.samples == 64


def test_a_rung_is_measured() -> None:
    found = measure(scenario(), 4, 16)
    assert found.events > 100 and found.seconds > 0 and found.peak_mb > 10
    assert found.us_per_event == pytest.approx(found.seconds / found.events * 1e6)


def test_exponents_are_those_of_n_log_n(tmp_path: Path) -> None:
    assert exponent(rungs(1.0), "devices") < 1.0 < exponent(rungs(2.0), "devices")
    found = {"both": rungs(1.0), "devices": rungs(1.0), "trajectories": rungs(1.0)[:1]}
    told = result(found, {"cores": 2})
    assert set(told) == {"bench", "machine", "settings", "modes", "ratios"}
    assert "exponent_both" in told["ratios"] and "exponent_trajectories" not in told["ratios"]
    assert told["modes"]["both"][0]["us_per_event"] == pytest.approx(10.0)
    picture = tmp_path / "out" / "speed.png"
    draw(found, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
