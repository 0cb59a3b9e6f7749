"""What `rose bench executor` measured here, simulated from its profile.

The same arrivals and the same rollouts (both follow from the benchmark's seeds), the same promises,
the same two engines: only the device is simulated, from the latency profile that was measured
before the benchmark. What no profile knows is taken from each engine alone: the host's part of a
first-token time (`compared.host_seconds`), how much longer a median token of serving takes than the
profile says (what an engine does between steps), and how much slower rollouts are (a profile
decodes greedily, rollouts draw their tokens). Nothing is fitted to modes in which both run.

Where a rollout step meets an arrival is chance, on the real device too. So the benchmark is played
several times, with other rollouts every time, and the middle result counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rose.bench.arrivals import Request
from rose.bench.colocated import MODES, WARM_S, Mode
from rose.bench.executor import Scenario, Settings
from rose.bench.rollouts import RolloutPlan, turns
from rose.bench.stats import Spread
from rose.cluster.profiles import path_for
from rose.executor.admission import Terms
from rose.executor.latency import ROLLOUT_QUANTILE, Profile
from rose.executor.slo import Slo
from rose.plan.device import Device
from rose.plan.engine import EngineModel
from rose.plan.fleet import Fleet
from rose.plan.lending import Kind
from rose.plan.progress import Say, quiet, tracked
from rose.plan.validation.compared import (
    PLAYED,
    THROUGHPUT,
    Compared,
    Seen,
    checked,
    host_seconds,
    load,
    pooled,
    scaled,
    speeds,
    tails,
)
from rose.plan.validation.node import (
    PREEMPT_S,
    ROLLOUT_TOKENS,
    engine,
    lending,
    lent,
    recorded_turns,
)
from rose.plan.workload.rollouts import Trajectories
from rose.plan.workload.traffic import Traffic

SERVING_TOKENS, SERVING_SEQUENCES, ROLLOUT_SEQUENCES = 512, 32, 16
"""As `bench.executor.node_config` starts engines."""
REST_S = 10.0
"""After the window, until all are served."""
TRAJECTORIES_PER_S = 10
"""More than a device could end."""
FIRST_SEED = 1000
"""Of arrivals and rollouts, as `bench.executor` counts its rounds."""
KNOWN_S = 1000.0
"""Of arrivals, from which a serving engine knows how long prompts are."""
SHOWN = ("serving_alone", "rollout_alone", "share_all", "rose", "rose_gate", "rose_strict",
         "idle_gate", "paper_slack")  # fmt: skip


class Slower(NamedTuple):
    """How much longer steps are than those that were profiled."""

    serving_s: float
    rollout: float
    """A factor."""


AS_IS = Slower(0.0, 1.0)


class Engines(NamedTuple):
    serving: EngineModel
    rollout: EngineModel


def executor(path: Path, say: Say = quiet) -> list[Compared]:
    """Every scenario and mode of a result of `rose bench executor`, but those whose requests follow
    from each other (their names say no load): the simulation knows requests by their lengths."""
    result = load(path, "executor")
    return checked(path, lambda: _play(result, say))


def _play(result: dict[str, Any], say: Say) -> list[Compared]:
    bench = _Bench(result["settings"])
    found: list[Compared] = []
    for name, part in result["modes"].items():
        if "modes" not in part or not name.rpartition("_")[2].isdigit():
            continue

        def play(mode: str, slower: Slower, name: str = name, part: Any = part) -> list[Seen]:
            plays = tracked(PLAYED, say(f"{name}: {mode}"))
            return [bench.simulate(name, part, MODES[mode], slower, number) for number in plays]

        slower = _calibrated(part["modes"], play)
        seen = {mode: play(mode, slower) for mode in SHOWN if mode in part["modes"]}
        found += _compare(name, part["modes"], seen)
    return found


def _calibrated(modes: dict[str, Any], play: Callable[[str, Slower], list[Seen]]) -> Slower:
    """From what each engine alone measured."""
    tpot = statistics.median(float(np.median(one.tpot)) for one in play("serving_alone", AS_IS))
    made = speeds(play("rollout_alone", AS_IS)).median
    return Slower(
        modes["serving_alone"]["tpot_s"]["p50"] - tpot,
        made / modes["rollout_alone"]["rollout_tok_s"]["median"],
    )


def _compare(name: str, modes: dict[str, Any], seen: dict[str, list[Seen]]) -> list[Compared]:
    """Throughput as a share of rollouts alone, P99s as users saw them."""
    host_s = host_seconds(modes["serving_alone"], seen["serving_alone"])
    measured = modes["rollout_alone"]["rollout_tok_s"]["median"]
    whole = speeds(seen["rollout_alone"]).median
    found = []
    for mode, ones in seen.items():
        told = modes[mode]
        if mode not in ("serving_alone", "rollout_alone"):
            ratio = scaled(Spread(**told["rollout_tok_s"]), 1 / measured)
            played = scaled(speeds(ones), 1 / whole)
            found.append(Compared("executor", name, mode, THROUGHPUT, ratio, played))
        found += tails("executor", name, mode, told, ones, host_s)
    return found


class _Bench:
    def __init__(self, told: dict[str, Any]) -> None:
        """`told`: the settings of the result."""
        keys = ("model", "device", "kv_gb", "seconds", "repeats", "quick")
        self._settings = Settings(**{key: told[key] for key in keys})
        self._profile = Profile.load(path_for(told["model"], "auto", told["device"]))

    def simulate(
        self, name: str, part: dict[str, Any], mode: Mode, slower: Slower, number: int
    ) -> Seen:
        """All windows of a mode; `number` 0 has the benchmark's own rollouts."""
        pattern, _, load = name.rpartition("_")
        scenario = Scenario(pattern, int(load) / 100)  # type: ignore[arg-type]
        work, rounds = scenario.workload(part["rate"]), self._settings.rounds
        engines = self._engines(slower, number)
        terms = Terms(mode.rule, PREEMPT_S if mode.preemption else None, mode.error_budget)
        known = work.requests(KNOWN_S, 0)
        sharing = lending(terms, Slo(**part["slo"]), *engines, known, work.rate)
        windows = []
        for seed in range(FIRST_SEED, FIRST_SEED + rounds):
            device = lent(0, *engines, int(self._settings.kv_gb * (1 << 30)), sharing)
            plan = replace(work.rollouts, seed=seed + number * rounds)
            seconds = self._settings.window(scenario)
            requests = work.requests(seconds, seed) if mode.serving else []
            windows.append(_window(device, requests, plan if mode.rollout else None, seconds))
        return pooled(windows)

    def _engines(self, slower: Slower, seed: int) -> Engines:
        model = self._settings.model
        serving = engine(self._profile, model, SERVING_TOKENS, SERVING_SEQUENCES,
                         longer_s=slower.serving_s, seed=seed)  # fmt: skip
        rollout = engine(self._profile, model, ROLLOUT_TOKENS, ROLLOUT_SEQUENCES,
                         slowdown=slower.rollout, quantile=ROLLOUT_QUANTILE, seed=seed)  # fmt: skip
        return Engines(serving, rollout)


def _window(
    device: Device, requests: list[Request], plan: RolloutPlan | None, seconds: float
) -> Seen:
    traffic = Traffic.of(requests, seconds)
    shifted = Traffic(traffic.arrival_s + WARM_S, traffic.prompt, traffic.output, seconds)
    kind = Kind(most_borrowed=int(plan is not None), activate_s=0.0)
    fleet = Fleet([device], [shifted], kind, np.random.default_rng(0))
    if plan is not None:
        fleet.refills = True
        count = int(TRAJECTORIES_PER_S * (WARM_S + seconds + REST_S))
        fleet.begin(_trajectories(plan, count), 0, most=plan.in_flight)
    fleet.pass_time(WARM_S)
    before = _made(device)
    fleet.pass_time(seconds)
    tokens = _made(device) - before
    fleet.pass_time(REST_S)
    ttft, tpot = np.array(fleet.users.served.ttft), np.array(fleet.users.served.tpot)
    return Seen(ttft, tpot[tpot > 0], tokens / seconds)


def _made(device: Device) -> int:
    """Tokens of turns, also of those that have not ended."""
    running = sum(job.new - (ends - device.rollout.made) for ends, _, job in device.rollout.ending)
    return device.rolled_tokens + running


def _trajectories(plan: RolloutPlan, count: int) -> Trajectories:
    return recorded_turns(
        [(len(turn.heard), turn.budget, turn.think_s) for turn in turns(plan, index)]
        for index in range(count)
    )
