"""What `rose bench e2e` measured here, simulated from its profiles and from its static runs.

Played again are the episodes as they were recorded, turn by turn, and the same arrivals, on a
device of the job's own and one that serves. Taken from the measurement, of `static` only, in which
nothing is lent:

    rollout     how much longer its steps are than the profile says: until sampling takes as long
                as it did
    serving     seconds that its steps are longer, until its engine has used as much CPU time as it
                did; and for every token that a step makes, until the median time per token is what
                it was: its HTTP server sends each one, on the same core
    front       CPU time for a request before its engine has it, until the median time to the first
                token is what it was
    host        CPU time of everything else, HTTP servers, scheduler and load generator, for each
                turn; what serving's tokens and requests take of it is theirs already
    rest        of a step: learning, checkpoint, weights; the same in all modes

Two cores are all there is, so devices do the host's work (`Fleet`). A request that comes while
rollouts do not give way waits for its HTTP server, too, and not for its engine only.
Of `elastic` it is taken how long a cold start is, by the clock and of the serving device's core.
What the modes come to is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench import arena, traces
from rose.bench.arena import Mode
from rose.bench.arrivals import Request
from rose.bench.cpu import Spent
from rose.bench.e2e import KV_GB, SEQUENCES
from rose.bench.stats import Spread
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
from rose.plan.workload.traffic import Traffic
from rose.rl.lengths import parsed

SERVING_TOKENS = 2048
"""Of a step: vLLM's own for API servers on CPUs."""
ACTIVATE_S = 0.1
"""Of a warm engine, as `rose bench executor` measures it."""
REST_S = 10.0
CORRECTIONS, LOOKS = 5, 3
"""How often, and from how many plays each time. Half of what lacks in a first token is added: its
host work often has half of a core."""


@dataclass(frozen=True)
class Given:
    """What is taken from the measurement."""

    rest_s: float
    """Of a step, beside sampling."""
    turn_s: float
    """CPU time of the host for each turn."""
    rollout: float = 1.0
    """How much longer rollout steps are than profiled."""
    step_s: float = 0.0
    """The same of serving's, in seconds."""
    token_s: float = 0.0
    """CPU time of the host for each token of serving."""
    front_s: float = 0.0
    """CPU time of the host for each serving request, before its engine has it."""


def e2e(path: Path, say: Say = quiet) -> list[Compared]:
    """Every algorithm and mode of a result of `rose bench e2e`."""
    result = load(path, "e2e")
    return checked(path, lambda: _play(result, say))


def _play(result: dict[str, Any], say: Say) -> list[Compared]:
    found: list[Compared] = []
    for algorithm, part in result["modes"].items():
        runs = part["runs"]
        if "static" not in runs:
            raise KeyError(f"the static runs of {algorithm}")
        bench = _Bench(result, Slo(**part["slo"]))
        say(f"{algorithm}: what static says")
        given = _given(bench, runs["static"])
        seen: dict[str, list[Seen]] = {}
        for mode, told in runs.items():
            plays = tracked(PLAYED, say(f"{algorithm}: {mode}"))
            seen[mode] = [
                bench.simulate(arena.MODES[mode], told["each"], given, number) for number in plays
            ]
        found += _compare(algorithm, runs, seen)
    return found


def _compare(algorithm: str, runs: dict[str, Any], seen: dict[str, list[Seen]]) -> list[Compared]:
    measured = runs["static"]["episodes_per_s"]["median"]
    whole = speeds(seen["static"]).median
    found = []
    for mode, ones in seen.items():
        told = runs[mode]
        if mode != "static":
            ratio = scaled(Spread(**told["episodes_per_s"]), 1 / measured)
            played = scaled(speeds(ones), 1 / whole)
            found.append(Compared("e2e", algorithm, mode, THROUGHPUT, ratio, played))
        found += tails("e2e", algorithm, mode, told, ones)
    return found


def _given(bench: _Bench, told: dict[str, Any]) -> Given:
    """What `static` tells."""
    runs = told["each"]
    steps = [step for run in runs for step in run["steps"]]
    spent = [Spent(**run["cpu"]) for run in runs]
    sampled_s = sum(step["sample_s"] for step in steps)
    turns = sum(step["turns"] * step["episodes"] for step in steps)
    host_s = sum(cpu.host_cores * cpu.seconds - cpu.nice for cpu in spent)
    served_s = sum(
        cpu.serving / cpu.seconds * (run["window"][1] - run["window"][0])
        for cpu, run in zip(spent, runs, strict=True)
    )
    rest_s = statistics.mean(step["step_s"] - step["sample_s"] for step in steps)
    given = Given(rest_s, host_s / turns)
    for _ in range(CORRECTIONS):
        static = pooled(
            [bench.simulate(arena.MODES["static"], runs, given, number) for number in range(LOOKS)]
        )
        ttft, tpot = float(np.median(static.ttft)), float(np.median(static.tpot))
        own_s = bench.served_s - given.token_s * bench.tokens
        more_s = (served_s - own_s) / bench.steps
        token_s = max(0.0, given.token_s + told["tpot_s"]["p50"] - tpot - more_s)
        front_s = max(0.0, given.front_s + (told["ttft_s"]["p50"] - ttft) / 2)
        for_serving_s = token_s * bench.tokens + front_s * told["requests"]
        given = Given(
            rest_s,
            max(0.0, host_s - for_serving_s) / turns,
            given.rollout * sampled_s / bench.sampled_s,
            given.step_s + more_s,
            token_s,
            front_s,
        )
    return given


class _Bench:
    def __init__(self, result: dict[str, Any], slo: Slo) -> None:
        settings = result["settings"]
        self._slo, self._rate = slo, settings["rate"]
        self._model, self._serving_model = settings["model"], settings["serving"]
        self._profiles = {name: Profile(**one) for name, one in result["profiles"].items()}
        recorded: tuple[Request, ...] = ()
        if settings["trace"]:
            recorded = tuple(traces.load(Path(settings["trace"])).requests)
        self._traffic = arena.Traffic(self._rate, recorded=recorded)
        self._wanted = settings["training"]["train"]["tasks"]
        self.sampled_s = self.served_s = 0.0
        self.steps = self.tokens = 0
        """In all runs of the last `simulate`: time of sampling, device time of serving, its steps
        and the tokens that they made."""

    def simulate(
        self, mode: Mode, runs: Sequence[dict[str, Any]], given: Given, number: int
    ) -> Seen:
        """All runs of a mode, for the `number`th time."""
        self.sampled_s = self.served_s = 0.0
        self.steps = self.tokens = 0
        seeds = range(number * len(runs), (number + 1) * len(runs))
        return pooled([self._run(mode, *one, given) for one in zip(runs, seeds, strict=True)])

    def _run(self, mode: Mode, run: dict[str, Any], seed: int, given: Given) -> Seen:
        steps = run["steps"]
        cold_s = run["activating_s"] / len(steps)
        kind = Kind(
            most_borrowed=int(mode.lent),
            activate_s=cold_s if mode.cold else ACTIVATE_S,
            host_s=given.turn_s,
            front_s=given.front_s,
        )
        requests = self._traffic.requests(arena.LONGEST_S, run["seed"])
        traffic = Traffic.of(requests, arena.LONGEST_S).slice(run["window"][0], arena.LONGEST_S)
        devices = self._devices(mode, requests, given, seed)
        fleet = Fleet(devices, [None, traffic], kind, np.random.default_rng(seed))
        episodes = 0
        for step in steps:
            began = fleet.now
            if mode.cold and cold_s:
                fleet.host.start_engine(devices[1], cold_s, run["starting_cpu_s"] / len(steps))
            episodes += self._sample(fleet, step)
            self.sampled_s += fleet.now - began
            if mode.cold:
                fleet.lending.release(fleet.now)
            fleet.pass_time(given.rest_s)
        seconds = fleet.now
        self._count(fleet, devices[1], traffic)
        fleet.pass_time(REST_S)
        return _seen(fleet, traffic, seconds, episodes / seconds)

    def _count(self, fleet: Fleet, device: Device, traffic: Traffic) -> None:
        assert device.serving is not None
        self.served_s += device.serving_s
        self.steps += device.serving.made
        self.tokens += int(np.sum(traffic.output[: len(fleet.users.served.ttft)] - 1))

    def _sample(self, fleet: Fleet, step: dict[str, Any]) -> int:
        """A step's groups: as many as are wanted, and one more for each that was of no use, as
        soon as that is known. Returns their episodes."""
        ends = np.cumsum([len(group) for group in step["groups"]]).tolist()
        begins = [0, *ends]
        plan = recorded_turns(
            [(heard, said, 0.0) for heard, said in parsed(one)]
            for group in step["groups"]
            for one in group
        )
        fleet.begin(plan, step["step"], most=ends[min(self._wanted, len(ends)) - 1])
        unknown = list(step["useless"])

        def known() -> list[int]:
            ended = ~np.isnan(fleet.ended)
            return [i for i in unknown if ended[begins[i] : ends[i]].all()]

        for following in ends[self._wanted :]:
            fleet.run(lambda: bool(known()))
            unknown.remove(known()[0])
            fleet.more(following, urgent=True)
        fleet.run(lambda: fleet.left == 0)
        return int(ends[-1])

    def _devices(
        self, mode: Mode, requests: Sequence[Request], given: Given, seed: int
    ) -> list[Device]:
        def rollout(name: str) -> EngineModel:
            return engine(self._profiles[name], self._model, ROLLOUT_TOKENS, SEQUENCES,
                          slowdown=given.rollout, quantile=ROLLOUT_QUANTILE, seed=seed)  # fmt: skip

        serving = engine(self._profiles["serving"], self._serving_model, SERVING_TOKENS, SEQUENCES,
                         longer_s=given.step_s, token_s=given.token_s, seed=seed)  # fmt: skip
        terms = Terms(mode.rule, PREEMPT_S if mode.preemption else None)
        borrowed, kv_total = rollout("lent"), int(KV_GB * (1 << 30))
        sharing = lending(terms, self._slo, serving, borrowed, requests, self._rate)
        own = Device(0, serving=None, rollout=rollout("dedicated"), kv_total=kv_total)
        return [own, lent(1, serving, borrowed, kv_total, sharing)]


def _seen(fleet: Fleet, traffic: Traffic, seconds: float, per_s: float) -> Seen:
    """Requests that came and were done while it trained, as the benchmark judges them."""
    served = fleet.users.served
    arrival, ttft, tpot = (np.array(one) for one in (served.arrival, served.ttft, served.tpot))
    ends = arrival + ttft + tpot * (traffic.output[: len(ttft)] - 1)
    inside = ends <= seconds
    return Seen(ttft[inside], tpot[inside & (tpot > 0)], per_s)
