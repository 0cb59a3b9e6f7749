"""How fast is the simulation itself? One RL step on ever larger fleets, each in its own process.

Three ladders from the same rung: more devices and trajectories together, more devices, more
trajectories. The exponent is the slope of log seconds over log (n log n): at 1 or below, cost grows
no worse than n log n. Devices are GPUs, as in the paper; an engine of the 32B preset takes four.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from rose.plan.job import simulate
from rose.plan.progress import Say, quiet
from rose.plan.scenario import Scenario
from rose.plan.systems import SYSTEMS
from rose.plan.workload.demand import Grpo

PRESET, SYSTEM = "paper-32b-grpo", "rose"
LADDERS: dict[str, tuple[tuple[int, int], ...]] = {
    "both": ((80, 1_024), (320, 4_096), (1_280, 16_384), (4_096, 65_536)),
    "devices": ((80, 1_024), (320, 1_024), (1_280, 1_024)),
    "trajectories": ((80, 1_024), (80, 4_096), (80, 16_384)),
}
"""GPUs, a fifth of them the job's own, and trajectories of the step. Many trajectories on few
devices take hours of simulated time, and many devices with few trajectories only serve: both at
once have the largest rung."""
TRAFFIC_S = 4_000.0
"""Of requests drawn before: longer than the step of every rung but the last of `trajectories`."""
MIB = 1024.0


@dataclass(frozen=True)
class Rung:
    devices: int
    trajectories: int
    seconds: float
    """Of one core."""
    events: int
    peak_mb: float
    """Of the process, imports included."""

    @property
    def us_per_event(self) -> float:
        return self.seconds / self.events * 1e6


def scaled(scenario: Scenario, devices: int, trajectories: int) -> Scenario:
    """One step of the same job and users on another number of GPUs."""
    engines = devices // scenario.tp
    own = max(1, round(engines * scenario.dedicated / (scenario.dedicated + scenario.lendable)))
    demand = Grpo(trajectories // scenario.job.demand.samples, scenario.job.demand.samples)
    longer = max(1.0, trajectories / 1_024 * 80 / devices)
    return replace(
        scenario,
        dedicated=own,
        lendable=engines - own,
        job=replace(scenario.job, demand=demand),
        steps=1,
        longest_s=TRAFFIC_S * longer,
    )


def measure(scenario: Scenario, devices: int, trajectories: int) -> Rung:
    began = time.process_time()
    found = simulate(scaled(scenario, devices, trajectories), SYSTEMS[SYSTEM])
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
    return Rung(devices, trajectories, seconds, found.events, peak)


def ladders(scenario: Scenario, most: int, say: Say = quiet) -> dict[str, list[Rung]]:
    """Of every ladder the rungs with at most so many trajectories and devices."""
    known: dict[tuple[int, int], Rung] = {}
    for name, rungs in LADDERS.items():
        for rung in rungs:
            if rung not in known and max(rung) <= most:
                say(f"{name}: {rung[0]:,} devices, {rung[1]:,} trajectories")
                known[rung] = _apart(scenario, rung)
    return {
        name: [known[rung] for rung in rungs if rung in known] for name, rungs in LADDERS.items()
    }


def _apart(scenario: Scenario, rung: tuple[int, int]) -> Rung:
    """Memory's peak is that of a process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, scenario, *rung).result()


def exponent(rungs: Sequence[Rung], ladder: str) -> float:
    """Of seconds over n log n."""
    n = np.array([r.trajectories if ladder == "trajectories" else r.devices for r in rungs])
    seconds = np.array([rung.seconds for rung in rungs])
    return float(np.polyfit(np.log(n * np.log(n)), np.log(seconds), 1)[0])


def result(found: dict[str, list[Rung]], machine: dict[str, Any]) -> dict[str, Any]:
    slopes = {
        f"exponent_{name}": exponent(rungs, name) for name, rungs in found.items() if len(rungs) > 1
    }
    largest = max((rung for rungs in found.values() for rung in rungs), key=lambda r: r.events)
    return {
        "bench": "plan speed",
        "machine": machine,
        "settings": {"preset": PRESET, "system": SYSTEM, "steps": 1},
        "modes": {
            name: [{**vars(rung), "us_per_event": rung.us_per_event} for rung in rungs]
            for name, rungs in found.items()
        },
        "ratios": slopes
        | {
            "seconds_32b_step": found["both"][0].seconds,
            "seconds_largest": largest.seconds,
            "peak_mb_largest": largest.peak_mb,
        },
    }


def draw(found: dict[str, list[Rung]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, colour in (("both", "#d9822b"), ("devices", "#2a6fbb"), ("trajectories", "#7a7f87")):
        rungs = found[name]
        if len(rungs) < 2:
            continue
        first = rungs[0]
        own = np.array([r.trajectories if name == "trajectories" else r.devices for r in rungs])
        times = own / own[0]
        label = f"{name}: (n log n)^{exponent(rungs, name):.2f}"
        left.loglog(times, [r.seconds for r in rungs], "o-", color=colour, label=label)
        right.semilogx(times, [r.us_per_event for r in rungs], "o-", color=colour)
        if name == "both":
            law = times * np.log(own) / np.log(own[0]) * first.seconds
            left.loglog(times, law, ":", color="#5a636d", label="n log n")
    left.set_ylabel("seconds of one core")
    right.set_ylabel("µs per event")
    right.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("times 80 devices, 1,024 trajectories")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
