"""A policy that changes, changes a number here: then look at it, and store the new one.

python -m tests.plan.test_reference
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.plan.test_fleet import scenario

from rose.plan.job import simulate
from rose.plan.systems import SYSTEMS
from rose.plan.workload.demand import Grpo

FILE = Path(__file__).with_name("reference.json")


def facts(name: str) -> dict[str, Any]:
    from dataclasses import replace

    many = scenario(job=replace(scenario().job, demand=Grpo(16, 8)))
    found = simulate(many, SYSTEMS[name])
    return {
        "rollout_s": [step.rollout_s for step in found.steps],
        "events": found.events,
        "cuts": found.cuts,
        "prefix_hits": found.prefix_hits,
        "ttft_sum": float(found.ttft.sum()),
        "tpot_sum": float(found.tpot.sum()),
        "lent": len(found.lent),
    }


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_simulation_is_what_it_was(name: str) -> None:
    stored = json.loads(FILE.read_text())[name]
    found = facts(name)
    assert found.keys() == stored.keys()
    for key, value in found.items():
        assert value == pytest.approx(stored[key], rel=1e-9), key


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: facts(name) for name in SYSTEMS}, indent=2) + "\n")
