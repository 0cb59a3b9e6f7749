"""What a fleet file becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.test_cli import written

from rose.plan.fleet_file import load
from rose.plan.hardware import gpu
from rose.plan.memory import free_bytes
from rose.plan.shapes import SHAPES


@pytest.mark.parametrize("tp", [1, 2])
def test_the_jobs_own_devices_have_the_memory_that_no_serving_engine_takes(
    tmp_path: Path, tp: int
) -> None:
    found, _ = load(written(tmp_path / "fleet.toml", devices={"tp": tp}))
    trained, served = SHAPES["Qwen3-8B"], SHAPES["Qwen2.5-7B"]
    assert found.own_kv_bytes == int(free_bytes(gpu("H100"), [trained], tp) * tp)
    assert found.own_kv_bytes - found.kv_bytes > served.weight_bytes()


def test_trajectories_in_flight_may_be_stated(tmp_path: Path) -> None:
    found, _ = load(written(tmp_path / "fleet.toml"))
    assert found.job.in_flight is None
    found, _ = load(written(tmp_path / "fleet.toml", job={"in_flight": 96}))
    assert found.job.in_flight == 96
