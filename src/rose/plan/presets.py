"""The paper's settings (arXiv 2605.06534) as scenarios, and its figures beside simulated ones.

The paper names devices, models, SLOs, batches and its results. It does not say how long its
trajectories are, what its serving load is, or how long it trains; `FREE` lists what is put in for
these, with the source of each or the word FITTED. What is fitted is fitted on the 8B rows and used
for all, so that 32B is a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from rose.executor.slo import Slo
from rose.plan.engine import EngineModel
from rose.plan.hardware import gpu
from rose.plan.memory import free_bytes
from rose.plan.roofline import Roofline
from rose.plan.scenario import RlJob, Scenario, Serving
from rose.plan.shapes import SHAPES, ModelShape
from rose.plan.sync import Links
from rose.plan.workload.demand import Accept, Dapo, Demand, Grpo
from rose.plan.workload.presets import ALFWORLD, FROZEN_LAKE, SERVICES
from rose.plan.workload.rollouts import Rollouts

GBIT = 1e9 / 8
LINKS = Links(wan_bytes_per_s=200 * GBIT, lan_bytes_per_s=400 * GBIT)
"""As the paper's testbed."""
LOAD = 0.19
"""Of serving's devices: mean SM use in the paper's cluster is 18.9 %."""
SERVICE = SERVICES["azure_chat"]
SPAN = 16_384
"""Tokens that a prompt token attends to at most: agents' contexts."""


class Paper(NamedTuple):
    """Figures of the paper; None where it has none."""

    throughput: float
    """ROSE over resource-fixed, whole steps."""
    spot_rollout: float
    """Rollout time of spot devices over ROSE's."""
    serverless_rollout: float
    rollout_s: float | None = None
    """Of ROSE in one step."""
    rollout_share: float | None = None
    """Of a step with fixed resources."""
    ttft_alone_ms: float | None = None
    tpot_alone_ms: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class Preset:
    name: str
    scenario: Scenario
    paper: Paper


@dataclass(frozen=True)
class _Size:
    """One of the paper's two testbeds."""

    rollout: ModelShape
    serving: ModelShape
    tp: int
    dedicated_gpus: int
    lendable_gpus: int
    trainer_gpus: int
    prompts: int
    samples: int
    law: Rollouts
    slo: Slo
    train_s: float


EIGHT = _Size(
    SHAPES["Qwen3-8B"], SHAPES["Qwen2.5-7B"], 1, 8, 16, 8, 16, 16, FROZEN_LAKE,
    Slo(0.5, 0.15), train_s=100.0,
)  # fmt: skip
THIRTY_TWO = _Size(
    SHAPES["Qwen3-32B"], SHAPES["Qwen2.5-32B"], 4, 16, 64, 32, 64, 16, ALFWORLD,
    Slo(1.0, 0.45), train_s=700.0,
)  # fmt: skip


def _engine(shape: ModelShape, tp: int) -> EngineModel:
    latency = Roofline(gpu("H800"), shape, tp, span=SPAN)
    return EngineModel(latency, shape.kv_bytes_per_token())


def _scenario(name: str, size: _Size, demand: Demand, staleness: int | None) -> Scenario:
    serving, rollout = _engine(size.serving, size.tp), _engine(size.rollout, size.tp)
    both = free_bytes(gpu("H800"), [size.serving, size.rollout], size.tp)
    return Scenario(
        name=name,
        dedicated=size.dedicated_gpus // size.tp,
        lendable=size.lendable_gpus // size.tp,
        trainers=size.trainer_gpus // size.tp,
        tp=size.tp,
        kv_bytes=int(both * size.tp),
        serving=Serving(serving, size.slo, _rate(serving), SERVICE.everywhere, SERVICE.sizes),
        job=RlJob(
            rollout, size.law, demand, size.train_s, staleness,
            parameters=size.rollout.parameters, density=0.03,
        ),
        links=LINKS,
    )  # fmt: skip
