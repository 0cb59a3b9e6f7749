"""`rose bench e2e`: the same RL work with static resources, elastic, share-all and rose.

For each algorithm, first the agent is trained once beside serving with nothing lent: that sets the
promises (`SLO_FACTOR` x the P99 of serving's requests) and warms everything up. Then every mode
trains the same agent with the same seed for the same steps, in an order that rotates with each
repeat, while the serving device carries the same arrivals. See docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from rose.bench.arena import MODES, NAME, Arena, Place, Run, Traffic, open_arena
from rose.bench.executor import machine
from rose.bench.stats import attainment, median_and_spread, percentiles
from rose.bench.traces import load as load_trace
from rose.cluster.config import ConfigError
from rose.cluster.profiles import path_for
from rose.executor.latency import Profile
from rose.executor.slo import Slo
from rose.rl import checkpoint
from rose.rl.weight_sync import COPIES

LOAD = 0.2
"""Of the serving device, on average."""
PROBE_RATE, PROBE_S = 0.5, 20.0
CONTEXT, SEQUENCES, KV_GB = 576, 8, 0.5
"""Of each rollout device: with few turns at once a step reads all weights for few tokens, as on a
GPU, and most of an RL step is sampling, as in the paper (87 and 71 %)."""
IN_FLIGHT = 24
"""Episodes at once: as many as both devices take and half as many more, so that a step's groups end
one after the other, and DAPO knows early which to replace."""
SEED = 7
STEP_KEYS = ("step", "episodes", "groups_tried", "turns", "tokens", "sample_s", "learn_s", "sync_s",
             "step_s", "at")  # fmt: skip
Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    model: str = "medium-wordy"
    serving: str = "small"
    steps: int = 2
    repeats: int = 3
    algorithms: tuple[str, ...] = ("grpo", "dapo")
    modes: tuple[str, ...] = tuple(MODES)
    trace: Path | None = None
    quick: bool = False
    out: Path = Path("bench-out")

    @property
    def rounds(self) -> int:
        return 1 if self.quick else self.repeats

    def check(self) -> None:
        for given, known, name in (
            (self.modes, tuple(MODES), "mode"),
            (self.algorithms, ("grpo", "dapo"), "algorithm"),
        ):
            if unknown := set(given) - set(known):
                raise ConfigError(f"--{name} {unknown.pop()}: choose from {', '.join(known)}")
        cores = psutil.Process().cpu_affinity()
        if not {0, 1} <= set(cores):
            raise ConfigError(f"rose bench e2e needs cores 0 and 1, and may use {cores}")


def training(settings: Settings, algorithm: str) -> dict[str, Any]:
    """What the trainer is told; the same in every mode."""
    return {
        "train": {
            "algorithm": algorithm,
            "steps": 2 if settings.quick else settings.steps,
            "tasks": 4,
            "samples": 16,
            "learned": 2,
            "learning_rate": 3e-5,
            "checkpoint_every": 1000,
            "threads": 2,
            "cores": [0, 1],
            "idle": True,
            "layers": 2,
        },
        "episodes": {
            "environment": "frozen_lake",
            "turns": 12,
            "turn_tokens": 36,
            "context": 512,
            "in_flight": IN_FLIGHT,
        },
    }


async def run(settings: Settings, say: Say, keep: Keep) -> dict[str, Any]:
    """Measure everything; `keep` gets the result so far after every training run."""
    settings.check()
    logging.getLogger("rose").setLevel(logging.WARNING)
    place = Place(
        settings.out / "e2e", settings.model, settings.serving, (5, 250),
        context=CONTEXT, max_seqs=SEQUENCES, kv_gb=KV_GB,
    )  # fmt: skip
    found: dict[str, Any] = {}
    async with open_arena(place, say) as arena:
        traffic = await _traffic(arena, settings, say)
        for algorithm in settings.algorithms:
            runs: dict[str, list[Run]] = {mode: [] for mode in settings.modes}
            told = training(settings, algorithm)
            before = await arena.run(MODES["static"], told, traffic, SEED - 1)
            _tidy(before)
            slo = arena.promise(before.samples)
            say(f"{algorithm}: SLO TTFT {slo.ttft_s * 1e3:.0f} ms, TPOT {slo.tpot_s * 1e3:.0f} ms")
            for repeat in range(settings.rounds):
                shift = repeat % len(settings.modes)
                for name in settings.modes[shift:] + settings.modes[:shift]:
                    done = await arena.run(MODES[name], told, traffic, SEED + repeat)
                    _tidy(done)
                    runs[name].append(done)
                    say(f"  {algorithm} {repeat + 1}/{settings.rounds} {_line(done, slo)}")
                    found[algorithm] = summary(runs, slo)
                    keep(result(settings, traffic, found))
    return found


async def _traffic(arena: Arena, settings: Settings, say: Say) -> Traffic:
    """At the rate that takes `LOAD` of the device, by what one request takes."""
    await arena.serve(Traffic(PROBE_RATE), 5.0, 1)
    before = arena.serving_seconds()
    samples = await arena.serve(Traffic(PROBE_RATE), PROBE_S, 2)
    if not samples:
        raise ConfigError("the serving engine answered nothing; see its log")
    each = (arena.serving_seconds() - before) / len(samples)
    say(f"a serving request alone takes {each:.2f} s of the device")
    recorded = tuple(load_trace(settings.trace).requests) if settings.trace else ()
    return Traffic(LOAD / each, recorded=recorded)


def _tidy(run: Run) -> None:
    """Checkpoints and weights of runs that are over would fill a disk."""
    (run.out / checkpoint.FILE).unlink(missing_ok=True)
    copies = sorted(COPIES.glob(f"{NAME}-*"), key=lambda copy: copy.stat().st_mtime)
    for old in copies[:-1]:
        shutil.rmtree(old, ignore_errors=True)


def _line(run: Run, slo: Slo) -> str:
    met = attainment(run.samples, slo)
    return (
        f"{run.mode:<10} {run.episodes_per_s:5.2f} episodes/s, {run.tokens_per_s:4.0f} tokens/s, "
        f"SLO {0 if met is None else met:.1%} of {len(run.samples)}, "
        f"reward {run.steps[-1]['reward']:.2f}, host {run.cpu.host_cores:.2f} cores"
    )


def summary(runs: dict[str, list[Run]], slo: Slo) -> dict[str, Any]:
    return {"slo": asdict(slo), "runs": {m: _mode(ones, slo) for m, ones in runs.items() if ones}}


def _mode(runs: list[Run], slo: Slo) -> dict[str, Any]:
    samples = [sample for run in runs for sample in run.samples]
    ttft = percentiles(s.ttft_s for s in samples)
    tpot = percentiles(s.tpot_s for s in samples)
    return {
        "episodes_per_s": asdict(median_and_spread([run.episodes_per_s for run in runs])),
        "tokens_per_s": asdict(median_and_spread([run.tokens_per_s for run in runs])),
        "sample_s": _mean([row["sample_s"] for run in runs for row in run.steps]),
        "learn_s": _mean([row["learn_s"] for run in runs for row in run.steps]),
        "sync_s": _mean([row["sync_s"] for run in runs for row in run.steps]),
        "reward": _mean([run.steps[-1]["reward"] for run in runs]),
        "rewards": [[row["reward"] for row in run.steps] for run in runs],
        "requests": len(samples),
        "slo_attainment": attainment(samples, slo),
        "ttft_s": asdict(ttft) if ttft else None,
        "tpot_s": asdict(tpot) if tpot else None,
        "allocation_overhead": _mean([run.activating_s / run.cpu.seconds for run in runs]),
        "lent": _mean([run.lent_s / run.cpu.seconds for run in runs]),
        "host_cores": _mean([run.cpu.host_cores for run in runs]),
        "serving_cores": _mean([run.cpu.serving / run.cpu.seconds for run in runs]),
        "trainer_cores": _mean([run.cpu.trainer / run.cpu.seconds for run in runs]),
        "each": [_told(run) for run in runs],
    }


def _told(run: Run) -> dict[str, Any]:
    """All that it takes to play a run again: `rose plan validate` does."""
    played = {row["step"]: row for row in run.lengths}
    return {
        "seed": run.seed,
        "window": run.window,
        "cpu": asdict(run.cpu),
        "lent_s": run.lent_s,
        "activating_s": run.activating_s,
        "starting_cpu_s": run.starting_cpu_s,
        "steps": [
            {key: row[key] for key in STEP_KEYS} | played.get(row["step"], {}) for row in run.steps
        ],
    }


def profiles(settings: Settings) -> dict[str, Any]:
    """How long engines' steps take, as it was measured before."""
    engines = {
        "serving": (settings.serving, "cpu:0"),
        "lent": (settings.model, "cpu:0"),
        "dedicated": (settings.model, "cpu:1"),
    }
    return {
        name: asdict(Profile.load(path_for(model, "auto", device)))
        for name, (model, device) in engines.items()
    }


def result(settings: Settings, traffic: Traffic, found: dict[str, Any]) -> dict[str, Any]:
    said = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
    return {
        "bench": "e2e",
        "machine": machine(),
        "settings": said | {"rate": traffic.rate, "training": training(settings, "ALGORITHM")},
        "profiles": profiles(settings),
        "modes": found,
        "ratios": ratios(found),
    }


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """The keys of the design, GRPO's plain and DAPO's with `_dapo`; SLOs the worst of both."""
    given: dict[str, Any] = {}
    for algorithm, part in found.items():
        modes = part["runs"]
        if "rose" not in modes or "static" not in modes:
            continue
        suffix = "" if algorithm == "grpo" else f"_{algorithm}"
        ours = modes["rose"]
        for other in ("static", "elastic", "share_all"):
            if other in modes:
                theirs = modes[other]["episodes_per_s"]["median"]
                ratio = ours["episodes_per_s"]["median"] / theirs
                given[f"throughput_vs_{other}{suffix}"] = ratio
        given[f"reward_gap_vs_static{suffix}"] = ours["reward"] - modes["static"]["reward"]
        _worst(given, "slo_attainment", ours["slo_attainment"], min)
        _worst(given, "serving_only_slo_attainment", modes["static"]["slo_attainment"], min)
        _worst(given, "allocation_overhead", ours["allocation_overhead"], max)
        if "share_all" in modes:
            attained = modes["share_all"]["slo_attainment"]
            _worst(given, "share_all_slo_attainment", attained, min)
    return given


def _worst(
    given: dict[str, Any], key: str, value: float | None, choose: Callable[..., float]
) -> None:
    if value is not None:
        given[key] = choose(given.get(key, value), value)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def main(settings: Settings, say: Say, keep: Keep) -> None:
    asyncio.run(run(settings, say, keep))
