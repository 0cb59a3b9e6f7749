"""Is the simulation right? What `rose bench executor` measured here, simulated from its profile.

The same arrivals (they follow from the benchmark's seeds), the same promises, the same two engines:
only the device is simulated, from the latency profile that was measured before the benchmark. Times
at users have the host's part in them, HTTP and sockets, which no profile knows: it is taken from
the median first-token time of serving alone and added to all modes (`host_s`).
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench.arrivals import Fixed, LogNormal
from rose.bench.colocated import CHAT, MODES, SHORT, Mode, Workload
from rose.cluster.profiles import path_for
from rose.executor.admission import Terms
from rose.executor.latency import Profile
from rose.executor.slo import Slo
from rose.models import kv_bytes_per_token, resolve
from rose.plan.device import Device
from rose.plan.engine import EngineModel
from rose.plan.fleet import Fleet
from rose.plan.lending import Kind
from rose.plan.progress import Say, quiet
from rose.plan.roofline import Measured
from rose.plan.sharing import PERCENTS, Prompts, Sharing
from rose.plan.workload.quantiles import Quantiles
from rose.plan.workload.rollouts import Rollouts
from rose.plan.workload.traffic import Traffic

SERVING_TOKENS, ROLLOUT_TOKENS = 512, 512
"""Of a step, as `bench.executor.node_config` and rose's nodes start engines."""
CREDIT_S, MARGIN = 2.0, 0.1
PREEMPT_S = 0.0005
WARM_S, REST_S = 3.0, 30.0
"""Before and after the window: until rollouts have filled their batch, until all are served."""
TRAJECTORIES = 5_000
SHOWN = ("serving_alone", "rollout_alone", "share_all", "rose", "rose_gate")


@dataclass(frozen=True)
class Compared:
    scenario: str
    mode: str
    key: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return abs(self.simulated - self.measured) / self.measured


@dataclass(frozen=True)
class Seen:
    """Of one mode, all windows."""

    ttft: np.ndarray
    tpot: np.ndarray
    tokens_per_s: float


def executor(path: Path, say: Say = quiet) -> list[Compared]:
    """Every scenario and mode of a result of `rose bench executor`."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; run `rose bench executor` first") from error
    settings = result["settings"]
    bench = _Bench(settings["model"], settings["device"], int(settings["kv_gb"] * (1 << 30)))
    found: list[Compared] = []
    for name, part in result["modes"].items():
        if "modes" not in part:
            continue
        seen = {}
        for mode in (m for m in SHOWN if m in part["modes"]):
            say(f"{name}: {mode}")
            seen[mode] = bench.simulate(name, part, MODES[mode], settings)
        found += _compare(name, part, seen)
    return found


def _compare(name: str, part: dict[str, Any], seen: dict[str, Seen]) -> list[Compared]:
    """Throughput as the design's ratio (harvest), P99s as users saw them."""
    alone = part["modes"]["serving_alone"]
    host_s = max(0.0, alone["ttft_s"]["p50"] - statistics.median(seen["serving_alone"].ttft))
    whole = seen["rollout_alone"].tokens_per_s
    measured_whole = part["modes"]["rollout_alone"]["rollout_tok_s"]["median"]
    found = []
    for mode, one in seen.items():
        told = part["modes"][mode]
        if mode not in ("serving_alone", "rollout_alone"):
            ratio = told["rollout_tok_s"]["median"] / measured_whole
            found.append(Compared(name, mode, "throughput", ratio, one.tokens_per_s / whole))
        if told["ttft_s"]:
            for key, values, extra in (("ttft", one.ttft, host_s), ("tpot", one.tpot, 0.0)):
                p99 = float(np.quantile(values, 0.99, method="higher")) + extra
                found.append(Compared(name, mode, f"{key}_p99", told[f"{key}_s"]["p99"], p99))
    return found


class _Bench:
    def __init__(self, model: str, device: str, kv_total: int) -> None:
        profile = Profile.load(path_for(model, "auto", device))
        kv = kv_bytes_per_token(resolve(model))
        self._serving = EngineModel(Measured(profile), kv, SERVING_TOKENS, 32)
        self._rollout = EngineModel(Measured(profile), kv, ROLLOUT_TOKENS, 16)
        self._kv_total = kv_total

    def simulate(
        self, name: str, part: dict[str, Any], mode: Mode, settings: dict[str, Any]
    ) -> Seen:
        pattern = name.partition("_")[0]
        output = CHAT if pattern == "chat" else SHORT
        work = Workload(part["rate"], bursty=pattern == "bursty", output=output)
        light = 1.0 if int(name.rpartition("_")[2]) > 50 else 2.0
        seconds, rounds = settings["seconds"] * light, settings["repeats"]
        windows = [self._window(work, mode, Slo(**part["slo"]), seconds, i) for i in range(rounds)]
        return Seen(
            np.concatenate([w.ttft for w in windows]),
            np.concatenate([w.tpot for w in windows]),
            float(np.mean([w.tokens_per_s for w in windows])),
        )

    def _window(self, work: Workload, mode: Mode, slo: Slo, seconds: float, repeat: int) -> Seen:
        requests = work.requests(seconds, 1000 + repeat) if mode.serving else []
        traffic = Traffic.of(requests, seconds)
        sharing = self._sharing(work, mode, slo)
        device = Device(
            0, serving=self._serving, rollout=self._rollout, kv_total=self._kv_total,
            sharing=sharing,
        )  # fmt: skip
        device.active = False
        rng = np.random.default_rng(repeat)
        shifted = Traffic(traffic.arrival_s + WARM_S, traffic.prompt, traffic.output, seconds)
        fleet = Fleet(
            [device], [shifted], Kind(most_borrowed=int(mode.rollout), activate_s=0.0), rng
        )
        if mode.rollout:
            fleet.refills = True
            plan = _trajectories(work).draw(TRAJECTORIES, 1, rng)
            fleet.begin(plan, 0, most=work.rollouts.in_flight)
        fleet.pass_time(WARM_S)
        before = _made(device)
        fleet.pass_time(seconds)
        tokens = _made(device) - before
        fleet.pass_time(REST_S)
        served = fleet.served
        return Seen(np.array(served.ttft), np.array(served.tpot), tokens / seconds)

    def _sharing(self, work: Workload, mode: Mode, slo: Slo) -> Sharing:
        drawn = work.prompt.array(5000, np.random.default_rng(0))
        percentiles = tuple(int(q) for q in np.percentile(drawn, PERCENTS))
        prompts = Prompts(percentiles, int(np.percentile(drawn, 99)), work.rate)
        preempt = PREEMPT_S if mode.preemption else None
        lendable = Slo(slo.ttft_s * (1 - MARGIN), slo.tpot_s * (1 - MARGIN))
        return Sharing(
            Terms(mode.rule, preempt, mode.error_budget), lendable, self._serving, self._rollout,
            prompts, credit_s=CREDIT_S,
        )  # fmt: skip


def _made(device: Device) -> int:
    """Tokens of turns, also of those that have not ended."""
    running = sum(job.new - (ends - device.rollout.made) for ends, _, job in device.rollout.ending)
    return device.rolled_tokens + running


def _trajectories(work: Workload) -> Rollouts:
    """The closed loop of the benchmark, as a law."""
    plan = work.rollouts
    turns = float(plan.turns)
    assert isinstance(plan.turn_tokens, LogNormal)
    return Rollouts(
        prompt=plan.prompt_tokens,
        turns=Quantiles(((0.0, turns), (1.0, turns))),
        output=plan.turn_tokens,
        observation=plan.observation_tokens or Fixed(1),
        tool_s=Quantiles(((0.0, plan.think_s), (1.0, plan.think_s))),
        alike=0.0,
        steady=0.0,
        context=1024,
    )
