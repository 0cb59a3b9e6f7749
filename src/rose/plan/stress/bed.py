"""Small fleets, so that hundreds of patterns can be tried.

What lending adds on a device depends on that device alone, so a few show it.
"""

from __future__ import annotations

from dataclasses import replace

from rose.bench.arrivals import LogNormal
from rose.executor.slo import Slo
from rose.plan.engine import EngineModel
from rose.plan.hardware import gpu
from rose.plan.memory import free_bytes
from rose.plan.roofline import Roofline
from rose.plan.scenario import RlJob, Scenario, Serving
from rose.plan.shapes import SHAPES
from rose.plan.sync import Links
from rose.plan.workload.demand import Grpo
from rose.plan.workload.laws import Poisson
from rose.plan.workload.quantiles import Quantiles
from rose.plan.workload.rollouts import Rollouts
from rose.plan.workload.serving import Sizes

OWN, LENT, GROUPS, SAMPLES = 1, 3, 4, 16
"""Devices, and trajectories of a step: as many to a device as the paper has."""
TRAIN_S = 10.0
"""Of learning: long enough that a step's end and the next one's begin are two moments."""
REST_S = 120.0
"""After the last step, until all requests are served."""


def bed() -> Scenario:
    """Qwen3-8B lent H100 of Qwen2.5-7B under the paper's promise; games of a few turns."""
    chip, served, trained = gpu("H100"), SHAPES["Qwen2.5-7B"], SHAPES["Qwen3-8B"]
    games = Rollouts(
        prompt=LogNormal(350, 0.1, 1024),
        turns=Quantiles(((0.0, 1), (0.5, 4), (1.0, 8))),
        output=LogNormal(200, 0.8, 2048),
        observation=LogNormal(80, 0.2, 256),
        tool_s=Quantiles(((0.5, 0.05), (0.99, 2.0))),
        alike=0.5,
        steady=0.4,
        context=32_768,
    )
    sizes = Sizes(LogNormal(700, 1.0, 8192), LogNormal(100, 0.8, 512))
    serving = EngineModel(Roofline(chip, served), served.kv_bytes_per_token())
    rollout = EngineModel(Roofline(chip, trained), trained.kv_bytes_per_token())
    whole = Scenario(
        "3 H100, Qwen3-8B beside Qwen2.5-7B",
        dedicated=OWN, lendable=LENT, trainers=1, tp=1,
        kv_bytes=int(free_bytes(chip, [served, trained])),
        serving=Serving(serving, Slo(0.5, 0.15), 0.5, Poisson(), sizes),
        job=RlJob(rollout, games, Grpo(GROUPS, SAMPLES), TRAIN_S, parameters=trained.parameters),
        links=Links(1e10, 1e10),
    )  # fmt: skip
    return reduced(whole)


def reduced(scenario: Scenario) -> Scenario:
    """Two steps of a fleet on a few of its devices, with as many trajectories to each."""
    job = replace(
        scenario.job, demand=Grpo(GROUPS, SAMPLES), staleness=None,
        train_s=min(TRAIN_S, scenario.job.train_s),
    )  # fmt: skip
    return replace(
        scenario,
        dedicated=OWN,
        lendable=min(LENT, scenario.lendable),
        job=job,
        steps=2,
        rest_s=REST_S,
    )
