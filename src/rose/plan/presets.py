"""The paper's settings (arXiv 2605.06534) as scenarios, and its figures beside simulated ones.

The paper names devices, models, SLOs, batches, links, the 16 trajectories of a GPU and results. It
does not say how long its trajectories are, what its serving load is, or how long it trains. `FREE`
lists what is put in for these: with its source, or as CHOSEN, or as FITTED and to what. Fits are to
8B figures; several choices were made with 32B figures in view (`CHOSEN`), so those are no clean
prediction. What comes of choices that no 32B throughput had a part in (`BLIND`) is told beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from rose.bench.arrivals import LogNormal
from rose.executor.slo import Slo
from rose.plan.engine import EngineModel
from rose.plan.hardware import gpu
from rose.plan.job import alone, simulate
from rose.plan.memory import free_bytes
from rose.plan.outcome import Outcome
from rose.plan.progress import Say, quiet
from rose.plan.roofline import Roofline
from rose.plan.scenario import RlJob, Scenario, Serving
from rose.plan.shapes import SHAPES, ModelShape
from rose.plan.sync import Codec, Links, sync_seconds
from rose.plan.systems import SYSTEMS
from rose.plan.workload.demand import Accept, Dapo, Demand, Grpo
from rose.plan.workload.presets import ALFWORLD, FROZEN_LAKE, SERVICES
from rose.plan.workload.rollouts import Rollouts
from rose.scheduler.placement import PAPER_CAP

GBIT = 1e9 / 8
LINKS = Links(wan_bytes_per_s=200 * GBIT, lan_bytes_per_s=400 * GBIT)
SERVICE = SERVICES["servegen_large"]
RATE = 0.8
"""Requests a second and engine."""
SPAN = 16_384
DENSITY = 0.03
LAKE = replace(FROZEN_LAKE, output=LogNormal(1200, 0.8, 12_288))
HOUSE = replace(ALFWORLD, output=LogNormal(130, 0.4, 2048), steady=0.4)
PLACES = PAPER_CAP
"""Trajectories of a GPU."""
KEPT = {"8b": 0.9, "32b": 1 / 5.7}
"""Share of groups that are of use."""
STALENESS = 1


@dataclass(frozen=True)
class Choices:
    """Where the paper can be read in more than one way."""

    house: Rollouts
    """Of 32B."""
    asynchronous_places: int
    """Trajectories of a GPU with AReaL."""
    share_of: str
    """System whose steps consist of rollouts for as much as the paper says."""


CHOSEN = Choices(HOUSE, 20, "rose_published")
BLIND = Choices(ALFWORLD, 32, "fixed")
"""Turns as `ALFWORLD` has them, from its time of rollouts; what fits AReaL on 8B; and the share of
rollouts as of the systems that the paper wants to make faster."""

FREE = {
    "serving lengths and arrivals": "ServeGen m-large (presets.SERVEGEN_LARGE): the paper names no "
    "trace; a large public one of the same region and year",
    "serving rate, 0.8 requests/s and engine": "FITTED to the P99 TTFT of serving alone, 8B",
    "tokens of a turn, 8B: median 1,200": "FITTED to ROSE's rollout time, 496 s; the rest of "
    "FROZEN_LAKE: turn limits of public configs, context of Qwen3 (32,768)",
    "tokens of a turn, 32B: median 130": "CHOSEN with 32B results in view, of 110 to 220 tried: "
    "the paper's 16 trajectories for each GPU fit into the KV cache beside serving; the rest of "
    "ALFWORLD: turn limits of public configs",
    "trajectories at once, 16 per GPU": "the paper's, for all systems that wait; in groups of "
    "environments with a queue each as in ROLL",
    "trajectories at once, AReaL: one batch, 20 per GPU": "a batch is its default of "
    "max_concurrent_rollouts; per GPU CHOSEN with both sizes in view: 16 give 1.77 and 2.48 times "
    "AReaL's throughput, 32 give 1.44 and 1.90, so 8B alone would have 32 (`blind`)",
    "DAPO's way to sample": "ROLL's: no environment is idle until enough groups are found (its "
    "default, max_traj_per_env unset), and what runs then is thrown away. CHOSEN with 32B in view: "
    "with 16 to 64 groups beyond those wanted 32B DAPO is not reached",
    "share of groups that DAPO keeps, 8B: 0.9": "FITTED to the throughput of 8B DAPO",
    "share of groups that DAPO keeps, 32B: 1/5.7": "the paper's largest demand, 5.7 batches; it "
    "does not say how much a step of its 32B run takes",
    "training time": "the paper's share of rollouts in a step, 86.9 % and 70.5 %, taken as of a "
    "step of ROSE; it does not say of which system. As of fixed resources (`blind`), 32B trains "
    "for so long that 2.69 times AReaL's throughput takes rollouts of AReaL that KV memory holds "
    "up: CHOSEN with that in view",
    "AReaL's staleness, 1": "CHOSEN",
    "share of weights that change, 3 %": "PULSE and others report 0.6 to 4.5 %; the paper > 95 % "
    "zeros",
    "engines": "roofline.Efficiency, marked there",
    "spot: 30 s until a device is there, an eighth of them": "delay FITTED to 7 % of the "
    "time, 8B GRPO; supply CHOSEN for the order of systems, of which the paper says nothing",
    "serverless: cold start of 115 s, a sixteenth of them": "FITTED to 15 to 26 % of the time, 8B "
    "GRPO; supply CHOSEN for the order",
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
    rollout_s: float | None = None
    """Of ROSE."""


@dataclass(frozen=True)
class Preset:
    name: str
    scenario: Scenario
    paper: Paper
    asynchronous_places: int


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
    """Of a step."""
    rollout_s: float
    """Of ROSE, with GRPO."""
    alone_ms: tuple[float, float]
    beside_ms: tuple[float, float]
    steps: int
    """Simulated: the more, the longer it takes and the less depends on luck."""


SAMPLES = 16
BEDS = {
    "8b": _Bed(
        SHAPES["Qwen3-8B"], SHAPES["Qwen2.5-7B"], 1, 8, 16, 8, 16, LAKE, Slo(0.5, 0.15),
        0.869, 496, (315, 118), (338, 136), 6,
    ),
    "32b": _Bed(
        SHAPES["Qwen3-32B"], SHAPES["Qwen2.5-32B"], 4, 16, 64, 32, 64, HOUSE, Slo(1.0, 0.45),
        0.705, 960, (716, 313), (838, 398), 2,
    ),
}  # fmt: skip
THROUGHPUT = {
    "paper-8b-grpo": (1.31, 1.44),
    "paper-8b-dapo": (1.42, None),
    "paper-32b-grpo": (1.46, 2.69),
    "paper-32b-dapo": (3.31, None),
}
NAMES = tuple(THROUGHPUT)


def preset(name: str, choices: Choices = CHOSEN) -> Preset:
    if name not in THROUGHPUT:
        raise ValueError(f"--preset {name}: choose from {', '.join(NAMES)}")
    _, size, algorithm = name.split("-")
    bed = BEDS[size]
    if size == "32b":
        bed = replace(bed, law=choices.house)
    demand: Demand = Grpo(bed.prompts, SAMPLES)
    if algorithm == "dapo":
        kept = Accept(KEPT[size], KEPT[size], 1)
        demand = Dapo(bed.prompts, SAMPLES, kept, additional=math.inf)
    sync, areal = THROUGHPUT[name]
    paper = Paper(
        sync, areal, alone_ms=bed.alone_ms, beside_ms=bed.beside_ms,
        rollout_s=bed.rollout_s if algorithm == "grpo" else None,
    )  # fmt: skip
    scenario = _scenario(name, bed, demand, choices.share_of)
    return Preset(name, scenario, paper, choices.asynchronous_places)


def _scenario(name: str, bed: _Bed, demand: Demand, share_of: str) -> Scenario:
    chip = gpu("H800")

    def engine(shape: ModelShape) -> EngineModel:
        return EngineModel(Roofline(chip, shape, bed.tp, span=SPAN), shape.kv_bytes_per_token())

    def kv_bytes(*models: ModelShape) -> int:
        return int(free_bytes(chip, models, bed.tp) * bed.tp)

    found = Scenario(
        name=name,
        dedicated=bed.dedicated // bed.tp,
        lendable=bed.lendable // bed.tp,
        trainers=bed.trainers // bed.tp,
        tp=bed.tp,
        kv_bytes=kv_bytes(bed.serving, bed.rollout),
        own_kv_bytes=kv_bytes(bed.rollout),
        serving=Serving(engine(bed.serving), bed.slo, RATE, SERVICE.everywhere, SERVICE.sizes),
        job=RlJob(
            engine(bed.rollout), bed.law, demand, 1.0,
            places=PLACES * bed.tp, in_flight=bed.prompts * SAMPLES,
            parameters=bed.rollout.parameters, density=DENSITY,
        ),
        links=LINKS,
        steps=bed.steps,
    )  # fmt: skip
    learns = 1 / bed.rollout_share - 1
    grpo = replace(found.job, demand=Grpo(bed.prompts, SAMPLES), train_s=learns * bed.rollout_s)
    rollout_s = simulate(replace(found, job=grpo), SYSTEMS[share_of]).rollout_s
    return replace(found, job=replace(found.job, train_s=learns * rollout_s))


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
        rows.append(_row("throughput vs AReaL", paper.asynchronous, _areal(one), "throughput"))
    rows += _blind(one.name, say)
    for name, given in (("spot", paper.spot), ("serverless", paper.serverless)):
        ratio = found[name].rollout_s / theirs.rollout_s
        rows.append(_row(f"rollout time, {name} vs ROSE", given, ratio, "rollout_time"))
    if paper.rollout_s is not None:
        rows.append(_row("rollout time of ROSE, s", paper.rollout_s, theirs.rollout_s))
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


def _areal(one: Preset) -> float:
    """Throughput with ROSE against that without, both asynchronous."""
    scenario = one.scenario
    places = one.asynchronous_places * scenario.tp
    job = replace(scenario.job, staleness=STALENESS, places=places)
    loose = replace(scenario, job=job, steps=2 * scenario.steps)
    lent, own = (simulate(loose, SYSTEMS[name]) for name in ("rose_published", "fixed_async"))
    return lent.throughput / own.throughput


def _blind(name: str, say: Say) -> list[Row]:
    """Throughput if no 32B figure had a part in any choice."""
    say(f"{name}: nothing chosen with 32B in view")
    one = preset(name, BLIND)
    lent, own = (simulate(one.scenario, SYSTEMS[each]) for each in ("rose_published", "fixed"))
    ratio = lent.throughput / own.throughput
    rows = [_row("throughput vs ROLL, blind", one.paper.throughput, ratio, "blind")]
    if one.paper.asynchronous is not None:
        rows.append(
            _row("throughput vs AReaL, blind", one.paper.asynchronous, _areal(one), "blind")
        )
    return rows


def ratios(rows: list[Row]) -> dict[str, float | bool]:
    """The keys of the design."""

    def worst(kind: str) -> float:
        return max(row.error for row in rows if row.kind == kind and row.error is not None)

    return {
        "throughput_error_max": worst("throughput"),
        "blind_throughput_error_max": worst("blind"),
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
