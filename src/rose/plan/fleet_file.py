"""An operator's fleet as a TOML file. What is unknown or impossible is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rose.bench.traces import TraceError
from rose.cluster.config import ConfigError, Strict, read
from rose.executor.latency import QUANTILE, ROLLOUT_QUANTILE, Profile
from rose.executor.slo import Slo
from rose.plan.engine import EngineModel
from rose.plan.hardware import gpu
from rose.plan.job import at_load
from rose.plan.memory import check_fits, free_bytes
from rose.plan.money import Prices
from rose.plan.roofline import Latency, Measured, Roofline
from rose.plan.scenario import RlJob, Scenario, Serving
from rose.plan.shapes import ModelShape, shape
from rose.plan.sync import Links
from rose.plan.workload.demand import Accept, Dapo, Demand, Grpo
from rose.plan.workload.laws import Law
from rose.plan.workload.presets import ROLLOUTS, SERVICES
from rose.plan.workload.recorded import Recorded
from rose.plan.workload.serving import Sizes

GBIT = 1e9 / 8
Share = Annotated[float, Field(gt=0, le=1)]


class Devices(Strict):
    gpu: str
    tp: int = Field(1, ge=1)
    """GPUs of a device: what one engine takes."""
    dedicated: int = Field(ge=1)
    lendable: int = Field(ge=0)
    trainers: int = Field(ge=1)


class ServingPart(Strict):
    model: str
    ttft_ms: float = Field(gt=0)
    tpot_ms: float = Field(gt=0)
    traffic: str = "azure_chat"
    """A shipped service; or see `trace`."""
    trace: Path | None = None
    rate: float | None = Field(None, gt=0)
    """Requests a second and device; or see `load`."""
    load: float | None = Field(None, gt=0, lt=1)
    """Share of the time that a device serves."""
    headroom: float = Field(0.2, ge=0, lt=1)
    prefix_hit_rate: float = Field(0.0, ge=0, lt=1)
    """Share of prompt tokens that are in the cache if nothing is lent and memory holds them."""
    prefix_return_s: float = Field(60.0, gt=0)
    """Mean time until somebody comes back to a prefix."""
    profile: Path | None = None
    """Measured by `rose profile`, instead of a roofline."""

    @model_validator(mode="after")
    def _one(self) -> ServingPart:
        if (self.rate is None) == (self.load is None):
            raise ValueError("give either rate or load")
        if self.trace is None and self.traffic not in SERVICES:
            raise ValueError(f"traffic is {self.traffic!r}: choose from {', '.join(SERVICES)}")
        return self


class JobPart(Strict):
    model: str
    rollouts: str = "agentic"
    algorithm: Literal["grpo", "dapo"] = "grpo"
    kept: tuple[Share, Share] = (Accept.first, Accept.last)
    """Share of groups that are of use to DAPO, in the run's first step and in its last."""
    prompts: int = Field(ge=1)
    samples: int = Field(ge=1)
    train_s: float = Field(gt=0)
    staleness: int | None = Field(None, ge=0)
    in_flight: int | None = Field(None, ge=1)
    """Trajectories at once in all, while nobody waits; by default as many as KV memory holds."""
    density: float = Field(0.01, gt=0, le=1)
    """Share of weights that a step changes; 0.6 to 4.5 % at usual learning rates."""
    profile: Path | None = None

    @model_validator(mode="after")
    def _known(self) -> JobPart:
        if self.rollouts not in ROLLOUTS:
            raise ValueError(f"rollouts is {self.rollouts!r}: choose from {', '.join(ROLLOUTS)}")
        return self


class LinksPart(Strict):
    wan_gbit: float = Field(10.0, gt=0)
    lan_gbit: float = Field(100.0, gt=0)


class PricesPart(Strict):
    dedicated_per_gpu_h: float = Field(Prices.dedicated_per_gpu_h, ge=0)
    serving_per_gpu_h: float = Field(Prices.serving_per_gpu_h, ge=0)
    idle_marginal_share: float = Field(Prices.idle_marginal_share, ge=0)
    wan_per_gb: float = Field(Prices.wan_per_gb, ge=0)
    scheduler_per_h: float = Field(Prices.scheduler_per_h, ge=0)
    penalty_per_violation: float = Field(Prices.penalty_per_violation, ge=0)
    reasoning_multiplier: float = Field(1.0, gt=0)
    accept_rate: float = Field(0.5, gt=0, le=1)
    """Of the verifier."""


class FleetFile(Strict):
    name: str
    devices: Devices
    serving: ServingPart
    job: JobPart
    links: LinksPart = LinksPart()
    prices: PricesPart = PricesPart()
    steps: int = Field(3, ge=1)
    seed: int = Field(0, ge=0)


def load(path: Path) -> tuple[Scenario, PricesPart]:
    file = read(path, FleetFile)
    try:
        return scenario(file), file.prices
    except (ValueError, TraceError) as error:
        raise ConfigError(f"{path}: {error}") from error


def scenario(file: FleetFile) -> Scenario:
    devices = file.devices
    served, trained = shape(file.serving.model), shape(file.job.model)
    chip = gpu(devices.gpu)

    def kv_bytes(*models: ModelShape) -> int:
        return int(free_bytes(chip, models, devices.tp) * devices.tp)

    check_fits(chip, served, devices.tp, rollout=trained, headroom=file.serving.headroom)
    law, sizes = _traffic(file.serving)
    serving = Serving(
        _engine(devices, served, file.serving.profile),
        Slo(file.serving.ttft_ms / 1e3, file.serving.tpot_ms / 1e3),
        file.serving.rate or 1.0,
        law,
        sizes,
        headroom=file.serving.headroom,
        prefix_hit_rate=file.serving.prefix_hit_rate,
        prefix_return_s=file.serving.prefix_return_s,
    )
    found = Scenario(
        name=file.name,
        dedicated=devices.dedicated,
        lendable=devices.lendable,
        trainers=devices.trainers,
        tp=devices.tp,
        kv_bytes=kv_bytes(served, trained),
        own_kv_bytes=kv_bytes(trained),
        serving=serving,
        job=RlJob(
            _engine(devices, trained, file.job.profile, ROLLOUT_QUANTILE),
            ROLLOUTS[file.job.rollouts],
            _demand(file.job, file.steps),
            file.job.train_s,
            file.job.staleness,
            in_flight=file.job.in_flight,
            parameters=trained.parameters,
            density=file.job.density,
        ),
        links=Links(file.links.wan_gbit * GBIT, file.links.lan_gbit * GBIT),
        steps=file.steps,
        seed=file.seed,
    )
    return found if file.serving.load is None else at_load(found, file.serving.load)


def _engine(
    devices: Devices, model: ModelShape, profile: Path | None, quantile: float = QUANTILE
) -> EngineModel:
    latency: Latency = Roofline(gpu(devices.gpu), model, devices.tp)
    if profile is not None:
        latency = Measured(Profile.load(profile), quantile=quantile)
    return EngineModel(latency, model.kv_bytes_per_token())


def _traffic(part: ServingPart) -> tuple[Law, Sizes | None]:
    if part.trace is not None:
        return Recorded.read(part.trace), None
    service = SERVICES[part.traffic]
    return service.everywhere, service.sizes


def _demand(part: JobPart, steps: int) -> Demand:
    """The steps of a DAPO plan are spread evenly over the run, its first and its last among them:
    the last ones ask for most."""
    if part.algorithm == "grpo":
        return Grpo(part.prompts, part.samples)
    if steps < 2:
        raise ValueError("steps is 1: DAPO needs 2 or more, the run's first and its last")
    return Dapo(part.prompts, part.samples, Accept(*part.kept, steps - 1))
