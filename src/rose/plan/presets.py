"""The paper's settings (arXiv 2605.06534) as scenarios, and its figures beside simulated ones.

The paper names devices, models, SLOs, batches, links and results. It does not say how long its
trajectories are, what its serving load is, or how long it trains; `FREE` lists what is put in for
these, with the source of each or the word CHOSEN: not fitted to the paper's figures yet, so read
the errors. What will be fitted is to be fitted on the 8B rows and used for all, so that 32B is a
prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from rose.executor.slo import Slo
from rose.plan.engine import EngineModel
from rose.plan.hardware import gpu
from rose.plan.job import Outcome, alone, simulate
from rose.plan.memory import free_bytes
from rose.plan.progress import Say, quiet
from rose.plan.roofline import Roofline
from rose.plan.scenario import RlJob, Scenario, Serving
from rose.plan.shapes import SHAPES, ModelShape
from rose.plan.sync import Codec, Links, sync_seconds
from rose.plan.systems import SYSTEMS
from rose.plan.workload.demand import Accept, Dapo, Demand, Grpo
from rose.plan.workload.presets import ALFWORLD, FROZEN_LAKE, SERVICES
from rose.plan.workload.rollouts import Rollouts

GBIT = 1e9 / 8
LINKS = Links(wan_bytes_per_s=200 * GBIT, lan_bytes_per_s=400 * GBIT)
SERVICE = SERVICES["servegen_large"]
RATE_PER_GPU = 0.8
SPAN = 16_384
DENSITY = 0.03
ACCEPT = Accept(0.25, 0.25, 1)
"""Of groups, late in training."""
SLOWDOWN = 1.1

FREE = {
    "serving lengths and arrivals": "ServeGen m-large (presets.SERVEGEN_LARGE): the paper names no "
    "trace; a large public one of the same region and year",
    "serving rate, 0.8 requests/s and GPU": "CHOSEN near the P99 TTFT of serving alone, 8B",
    "trajectory lengths": "presets.FROZEN_LAKE and ALFWORLD: turn limits of public configs; tokens "
    "CHOSEN so that 75 % end in the first 30 % of the time, at 25 and 45 ms a token",
    "training time": "follows from the paper's share of rollouts in a step, 86.9 % and 70.5 %",
    "share of weights that change, 3 %": "PULSE and others report 0.6 to 4.5 %; the paper > 95 % "
    "zeros",
    "share of groups that DAPO keeps, 1/4": "CHOSEN for the paper's largest demand, 5.7 batches",
    "slowdown of engines that take turns, 1.1": "CHOSEN",
    "engines": "roofline.Efficiency, marked there",
    "acquisition of spot and serverless devices": "systems/spot.py, systems/serverless.py, CHOSEN",
}


class Paper(NamedTuple):
    """Its figures; None where it has none for the preset."""

    throughput: float
    """ROSE over resource-fixed, whole steps."""
    asynchronous: float | None
    """The same on AReaL."""
    spot: tuple[float, float] = (1.20, 1.26)
    """Rollout time over ROSE's: lowest and highest that it reports."""
    serverless: tuple[float, float] = (1.26, 1.5)
    overheads: tuple[float, float, float] = (0.0035, 0.07, 0.205)
    """Share of time spent acquiring devices: ROSE, spot, serverless."""
    alone_ms: tuple[float, float] = (0.0, 0.0)
    """P99 TTFT and TPOT."""
    beside_ms: tuple[float, float] = (0.0, 0.0)
    sync: tuple[float, float] = (9.0, 12.0)
    """Dense over sparse transfer time."""


@dataclass(frozen=True)
class Preset:
    name: str
    scenario: Scenario
    paper: Paper


@dataclass(frozen=True)
class Row:
    name: str
    paper: str
    simulated: float
    error: float | None
    """Relative, to the nearest end of what the paper reports."""
    kind: str = ""


@dataclass(frozen=True)
class _Bed:
    """One of the paper's two testbeds."""

    rollout: ModelShape
    serving: ModelShape
    tp: int
    dedicated: int
    lendable: int
    trainers: int
    """GPUs."""
    prompts: int
    law: Rollouts
    slo: Slo
    rollout_share: float
    """Of a step with fixed resources."""
    alone_ms: tuple[float, float]
    beside_ms: tuple[float, float]


SAMPLES = 16
BEDS = {
    "8b": _Bed(
        SHAPES["Qwen3-8B"], SHAPES["Qwen2.5-7B"], 1, 8, 16, 8, 16, FROZEN_LAKE, Slo(0.5, 0.15),
        0.869, (315, 118), (338, 136),
    ),
    "32b": _Bed(
        SHAPES["Qwen3-32B"], SHAPES["Qwen2.5-32B"], 4, 16, 64, 32, 64, ALFWORLD, Slo(1.0, 0.45),
        0.705, (716, 313), (838, 398),
    ),
}  # fmt: skip
THROUGHPUT = {
    "paper-8b-grpo": (1.31, 1.44),
    "paper-8b-dapo": (1.42, None),
    "paper-32b-grpo": (1.46, 2.69),
    "paper-32b-dapo": (3.31, None),
}
NAMES = tuple(THROUGHPUT)


def preset(name: str) -> Preset:
    if name not in THROUGHPUT:
        raise ValueError(f"--preset {name}: choose from {', '.join(NAMES)}")
    _, size, algorithm = name.split("-")
    bed = BEDS[size]
    demand: Demand = Grpo(bed.prompts, SAMPLES)
    if algorithm == "dapo":
        demand = Dapo(bed.prompts, SAMPLES, ACCEPT)
    sync, areal = THROUGHPUT[name]
    paper = Paper(sync, areal, alone_ms=bed.alone_ms, beside_ms=bed.beside_ms)
    return Preset(name, _scenario(name, bed, demand), paper)


def _scenario(name: str, bed: _Bed, demand: Demand) -> Scenario:
    chip = gpu("H800")

    def engine(shape: ModelShape) -> EngineModel:
        return EngineModel(Roofline(chip, shape, bed.tp, span=SPAN), shape.kv_bytes_per_token())

    both = free_bytes(chip, [bed.serving, bed.rollout], bed.tp)
    found = Scenario(
        name=name,
        dedicated=bed.dedicated // bed.tp,
        lendable=bed.lendable // bed.tp,
        trainers=bed.trainers // bed.tp,
        tp=bed.tp,
        kv_bytes=int(both * bed.tp),
        serving=Serving(
            engine(bed.serving), bed.slo, RATE_PER_GPU * bed.tp, SERVICE.everywhere, SERVICE.sizes
        ),
        job=RlJob(
            engine(bed.rollout), bed.law, demand, 1.0,
            parameters=bed.rollout.parameters, density=DENSITY,
        ),
        links=LINKS,
        slowdown=SLOWDOWN,
    )  # fmt: skip
    grpo = replace(found.job, demand=Grpo(bed.prompts, SAMPLES))
    rollout_s = simulate(replace(found, job=grpo, lendable=0), SYSTEMS["fixed"]).rollout_s
    train_s = rollout_s * (1 / bed.rollout_share - 1)
    return replace(found, job=replace(found.job, train_s=train_s))


def compare(one: Preset, say: Say = quiet) -> list[Row]:
    """Every figure of the paper that the simulation has too."""
    scenario, paper = one.scenario, one.paper
    found: dict[str, Outcome] = {}
    for name in ("fixed", "rose_published", "rose", "spot", "serverless"):
        progress = say(f"{one.name}: {SYSTEMS[name].says}")
        found[name] = simulate(scenario, SYSTEMS[name], progress)
    theirs = found["rose_published"]
    rows = [_row("throughput vs ROLL", paper.throughput,
                 theirs.throughput / found["fixed"].throughput, "throughput")]  # fmt: skip
    if paper.asynchronous is not None:
        say(f"{one.name}: asynchronous")
        loose = replace(scenario, job=replace(scenario.job, staleness=1), steps=6)
        ratio = (simulate(loose, SYSTEMS["rose_published"]).throughput
                 / simulate(loose, SYSTEMS["fixed"]).throughput)  # fmt: skip
        rows.append(_row("throughput vs AReaL", paper.asynchronous, ratio, "throughput"))
    for name, given in (("spot", paper.spot), ("serverless", paper.serverless)):
        ratio = found[name].rollout_s / theirs.rollout_s
        rows.append(_row(f"rollout time, {name} vs ROSE", given, ratio, "rollout_time"))
    for name, share in zip(("rose_published", "spot", "serverless"), paper.overheads, strict=True):
        rows.append(_row(f"allocation overhead, {name}", share, found[name].allocation_overhead))
    quiet = alone(scenario, scenario.alone_s)
    for what, first, second in zip(("ttft", "tpot"), paper.alone_ms, paper.beside_ms, strict=True):
        rows.append(_row(f"P99 {what} alone, ms", first, quiet.p99(what) * 1e3, "p99"))
        rows.append(_row(f"P99 {what} beside ROSE, ms", second, theirs.p99(what) * 1e3, "p99"))
    rows.append(_row("sync time, dense vs sparse", paper.sync, _sync_ratio(scenario)))
    rows += [
        Row("throughput of rose (ours) vs ROLL", "-",
            found["rose"].throughput / found["fixed"].throughput, None),
        Row("SLO met, ROSE as published", "1.0", theirs.attainment or 0.0, None),
        Row("SLO met, rose (ours)", "-", found["rose"].attainment or 0.0, None),
        Row("order right", "fixed > serverless > spot > ROSE", float(_order(found)), None, "order"),
    ]  # fmt: skip
    return rows


def ratios(rows: list[Row]) -> dict[str, float | bool]:
    """The keys of the design."""

    def worst(kind: str) -> float:
        return max(row.error for row in rows if row.kind == kind and row.error is not None)

    return {
        "throughput_error_max": worst("throughput"),
        "rollout_time_error_max": worst("rollout_time"),
        "p99_error_max": worst("p99"),
        "order_right": bool(next(row.simulated for row in rows if row.kind == "order")),
    }


def _order(found: dict[str, Outcome]) -> bool:
    """Rollouts of ROSE are shortest, then spot, then serverless; all are shorter than fixed."""
    times = [found[n].rollout_s for n in ("rose_published", "spot", "serverless", "fixed")]
    return times == sorted(times)


def _sync_ratio(scenario: Scenario) -> float:
    def seconds(codec: Codec, density: float) -> float:
        found = sync_seconds(
            scenario.job.parameters, density, scenario.links, codec=codec,
            engines=scenario.lendable, tp=scenario.tp, trainer_ranks=scenario.trainers,
        )  # fmt: skip
        return found.transfer_s

    return seconds(Codec.DENSE, 1.0) / seconds(Codec.COO, scenario.job.density)


def _row(name: str, paper: float | tuple[float, float], simulated: float, kind: str = "") -> Row:
    low, high = paper if isinstance(paper, tuple) else (paper, paper)
    nearest = min(max(simulated, low), high)
    shown = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return Row(name, shown, simulated, abs(simulated - nearest) / nearest, kind)
