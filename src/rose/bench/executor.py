"""`rose bench executor`: serving alone, rollout alone, share-all, static split, rose, side by side.

For every scenario (load x pattern) the modes run one after the other on the same two engines with
the same arrivals, in an order that rotates with every repeat; samples of a mode are pooled over the
repeats. The SLO of a scenario is `SLO_FACTOR` x the P99 of serving alone, measured in a calibration
run just before. See docs/benchmarks.md for the method.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from rose.bench import pressure
from rose.bench.colocated import CHAT, MODES, SHORT, Run, Workload, run_mode, settle
from rose.bench.stats import Sample, attainment, median_and_spread, p99_ratio, percentiles
from rose.cluster import api
from rose.cluster.config import ConfigError, NodeConfig, parse
from rose.cluster.node import Node
from rose.executor.slo import Slo

SLO_FACTOR = 1.5
FIRST_SLO = Slo(20.0, 5.0)
"""Promises while calibrating: loose, nothing is lent then anyway."""
ORDERS_REPEATED = 20

BASELINES = ("serving_alone", "rollout_alone")
AGAIN = "serving_again"
"""Serving alone a second time: how much two measurements of the same thing differ."""
MAIN_MODES = (*BASELINES, AGAIN, "share_all", "rose", "rose_gate")
"""The other modes, which compare rules, run where the device is busiest and steady."""
LIGHT_MODES = (*BASELINES, AGAIN, "rose", "rose_gate")
"""Where the device is mostly idle: requests are rare, so hundreds of them take long."""
CHAT_MODES = (*BASELINES, "rose", "rose_gate", "idle_gate", "paper_slack")
"""Where serving is hardly ever idle: what is lent is slack or nothing."""
LIGHT = 2.0
"""Windows of a lightly loaded device are longer by this."""

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Scenario:
    pattern: Literal["steady", "bursty", "chat"]
    load: float
    """Device time that the requests would take one by one, of all time. Served together they take
    less, so that it may exceed 1."""
    modes: tuple[str, ...] = tuple(MODES)

    @property
    def name(self) -> str:
        return f"{self.pattern}_{self.load:.0%}".replace("%", "")

    def workload(self, rate: float) -> Workload:
        output = CHAT if self.pattern == "chat" else SHORT
        return Workload(rate, bursty=self.pattern == "bursty", output=output)


@dataclass(frozen=True)
class Settings:
    model: str = "smollm2"
    device: str = "cpu:0"
    kv_gb: float = 0.25
    seconds: float = 50.0
    repeats: int = 3
    quick: bool = False
    only: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    """Beside serving alone and rollout alone; all that a scenario has when empty."""
    out: Path = Path("bench-out")

    def scenarios(self) -> list[Scenario]:
        if self.quick:
            return [Scenario("bursty", 0.6, MAIN_MODES)]
        every = [
            Scenario("steady", 0.6, tuple(MODES)),
            Scenario("chat", 1.4, CHAT_MODES),
            Scenario("bursty", 0.6, MAIN_MODES),
            Scenario("bursty", 0.2, LIGHT_MODES),
            Scenario("steady", 0.2, LIGHT_MODES),
        ]
        known = [scenario.name for scenario in every]
        if unknown := set(self.only) - set(known):
            raise ConfigError(f"--scenario {unknown.pop()}: choose from {', '.join(known)}")
        if unknown := set(self.modes) - set(MODES):
            raise ConfigError(f"--mode {unknown.pop()}: choose from {', '.join(MODES)}")
        return [
            replace(scenario, modes=self._wanted(scenario.modes))
            for scenario in every
            if not self.only or scenario.name in self.only
        ]

    def _wanted(self, modes: tuple[str, ...]) -> tuple[str, ...]:
        if not self.modes:
            return modes
        return tuple(mode for mode in MODES if mode in (*BASELINES, AGAIN, *self.modes))

    def window(self, scenario: Scenario) -> float:
        """A light load needs longer for as many requests."""
        if self.quick:
            return 40.0
        return self.seconds * (1.0 if scenario.load > 0.5 else LIGHT)

    @property
    def rounds(self) -> int:
        return 1 if self.quick else self.repeats


def node_config(settings: Settings) -> NodeConfig:
    wanted = {
        "device": settings.device,
        "kv_gb": settings.kv_gb,
        "page": Path(f"/dev/shm/rose-bench-{settings.device.replace(':', '')}"),
        "port": 0,
        "log_dir": settings.out / "logs",
        "serving": {
            "model": settings.model,
            "ttft_ms": FIRST_SLO.ttft_s * 1e3,
            "tpot_ms": FIRST_SLO.tpot_s * 1e3,
            "max_model_len": 1024,
            "args": ["--max-num-batched-tokens", "512"],
        },
        "rollout": {"model": settings.model, "max_model_len": 1024, "max_seqs": 16},
    }
    return parse(wanted, "rose bench")


async def run(settings: Settings, say: Say, keep: Keep) -> dict[str, dict[str, list[Run]]]:
    """Measure everything; `keep` gets the result so far after every part. Returns the runs."""
    logging.getLogger("rose").setLevel(logging.WARNING)
    config = node_config(settings)
    say(f"starting two engines with {settings.model} on {settings.device}")
    async with api.running(config) as node:
        psutil.Process().cpu_affinity(list(config.where.host_cores))
        if node.preemption is None:
            say("sub-step preemption does not work on this host: mode `rose` is the gate alone")
        service = await _service_seconds(node, Workload(rate=0.5), say)
        found: dict[str, Any] = {}
        runs: dict[str, dict[str, list[Run]]] = {}
        say("memory pressure, revocation, activation, dormant cost")
        found["memory"] = await pressure.measure(node, 3 if settings.quick else 10, say)
        found["policies"] = await pressure.compare_policies(node, 1 if settings.quick else 4, say)
        found["orders"] = await pressure.orders(node, 6 if settings.quick else ORDERS_REPEATED)
        for scenario in settings.scenarios():
            found[scenario.name], runs[scenario.name] = await _scenario(
                node, scenario, settings, service, say
            )
            keep(_result(settings, service, found))
    return runs


def _result(settings: Settings, service: float, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "bench": "executor",
        "machine": machine(),
        "settings": {
            **{k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()},
            "service_seconds": service,
            "workload": str(Workload(0.0)),
        },
        "modes": dict(found),
        "ratios": _ratios(found),
    }


async def _service_seconds(node: Node, probe: Workload, say: Say) -> float:
    """Device seconds that one serving request costs when it is alone, for choosing the rate."""
    alone = MODES["serving_alone"]
    await run_mode(node, alone, probe, 8.0, FIRST_SLO, seed=1)
    measured = await run_mode(node, alone, probe, 30.0, FIRST_SLO, seed=2)
    service = measured.serving_cpu * measured.seconds / len(measured.samples)
    say(f"one serving request alone takes {service:.2f} s of the device")
    return service


async def _scenario(
    node: Node, scenario: Scenario, settings: Settings, service: float, say: Say
) -> tuple[dict[str, Any], dict[str, list[Run]]]:
    node.promise(FIRST_SLO)
    if scenario.pattern == "chat":
        service = await _service_seconds(node, scenario.workload(0.2), say)
    workload = scenario.workload(scenario.load / service)
    as_long = settings.window(scenario) * settings.rounds  # a P99 of as many requests
    calibration = await run_mode(
        node, MODES["serving_alone"], workload, as_long, FIRST_SLO, seed=100
    )
    slo = slo_from(calibration)
    node.promise(slo)
    say(
        f"{scenario.name}: {workload.rate:.2f} req/s, SLO TTFT {slo.ttft_s * 1e3:.0f} ms, "
        f"TPOT {slo.tpot_s * 1e3:.0f} ms"
    )
    runs: dict[str, list[Run]] = {name: [] for name in scenario.modes}
    for repeat in range(settings.rounds):
        order = scenario.modes[repeat % len(scenario.modes) :] + scenario.modes[:repeat]
        for name in dict.fromkeys(order):
            if name == "rollout_alone" and repeat:
                continue  # no arrivals, no tail: once is enough
            await settle(node)
            done = await run_mode(
                node, MODES[name], workload, settings.window(scenario), slo, seed=1000 + repeat
            )
            runs[name].append(done)
            say(f"  {scenario.name} {repeat + 1}/{settings.rounds} {_line(done, slo)}")
    return _summary(runs, slo, workload), runs


def slo_from(calibration: Run) -> Slo:
    """The promises of a scenario: `SLO_FACTOR` x the P99 of serving alone."""
    ttft = percentiles(s.ttft_s for s in calibration.undisturbed)
    tpot = percentiles(s.tpot_s for s in calibration.undisturbed)
    if ttft is None or tpot is None:
        raise RuntimeError(
            "serving alone answered no request while this machine had its CPU time; see its log"
        )
    return Slo(SLO_FACTOR * ttft.p99, SLO_FACTOR * tpot.p99)


def _line(run: Run, slo: Slo) -> str:
    ttft = percentiles(s.ttft_s for s in run.undisturbed)
    tpot = percentiles(s.tpot_s for s in run.undisturbed)
    parts = [f"{run.mode:<14}"]
    if ttft and tpot:
        share = attainment(run.samples, slo)
        parts.append(
            f"TTFT {ttft.p50 * 1e3:5.0f}/{ttft.p99 * 1e3:5.0f} ms  "
            f"TPOT {tpot.p50 * 1e3:4.0f}/{tpot.p99 * 1e3:4.0f} ms  "
            f"SLO {0 if share is None else share:7.2%}"
        )
    parts.append(f"rollout {run.rollout_tokens / run.seconds:5.1f} tok/s")
    parts.append(f"device: serving {run.serving_cpu:.0%} rollout {run.rollout_cpu:.0%}")
    return "  ".join(parts)


def _summary(runs: dict[str, list[Run]], slo: Slo, workload: Workload) -> dict[str, Any]:
    idle = 1.0 - _mean([r.serving_cpu for r in runs["serving_alone"]])
    dedicated = _mean([r.rollout_tokens / r.seconds for r in runs["rollout_alone"]])
    alone = [sample for one in runs["serving_alone"] for sample in one.undisturbed]
    modes: dict[str, Any] = {}
    for name, repeats in runs.items():
        samples = [sample for one in repeats for sample in one.samples]
        calm = [sample for one in repeats for sample in one.undisturbed]
        speeds = [r.rollout_tokens / r.seconds for r in repeats]
        modes[name] = {
            "requests": len(samples),
            "disturbed": len(samples) - len(calm),
            "ttft_s": _shown(_ttft(calm)),
            "tpot_s": _shown(_tpot(calm)),
            "ttft_all_s": _shown(_ttft(samples)),
            "tpot_all_s": _shown(_tpot(samples)),
            "ttft_p99_vs_alone": _against(_ttft(calm), _ttft(alone)),
            "tpot_p99_vs_alone": _against(_tpot(calm), _tpot(alone)),
            "slo_attainment": attainment(samples, slo),
            "slo_attainment_undisturbed": attainment(calm, slo),
            "rollout_tok_s": asdict(median_and_spread(speeds)),
            "harvest_efficiency": _mean(speeds) / (dedicated * idle),
            "serving_cpu": _mean([r.serving_cpu for r in repeats]),
            "rollout_cpu": _mean([r.rollout_cpu for r in repeats]),
            "aborted_turns": sum(sum(r.rollout.aborts.values()) for r in repeats if r.rollout),
            "windows": [_window(run, slo) for run in repeats],
        }
    return {
        "slo": asdict(slo),
        "rate": workload.rate,
        "idle_alone": idle,
        "modes": modes,
        "overhead_us": max(
            max(m.serving.overhead_us, m.rollout.overhead_us)
            for one in (*runs.get("rose", []), *runs.get("rose_gate", []), *runs["serving_alone"])
            for m in one.moments[-5:]
        ),
    }


def _window(run: Run, slo: Slo) -> dict[str, Any]:
    return {
        "requests": len(run.samples),
        "disturbed": len(run.samples) - len(run.undisturbed),
        "ttft_s": _shown(_ttft(run.undisturbed)),
        "tpot_s": _shown(_tpot(run.undisturbed)),
        "slo_attainment": attainment(run.samples, slo),
        "rollout_tok_s": run.rollout_tokens / run.seconds,
    }


def _ttft(samples: list[Sample]) -> list[float]:
    return [sample.ttft_s for sample in samples if sample.ttft_s is not None]


def _tpot(samples: list[Sample]) -> list[float]:
    return [sample.tpot_s for sample in samples if sample.tpot_s is not None]


def _shown(values: list[float]) -> dict[str, Any] | None:
    found = percentiles(values)
    return asdict(found) if found else None


def _against(ours: list[float], alone: list[float]) -> dict[str, Any] | None:
    return asdict(p99_ratio(ours, alone)) if ours and alone else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ratios(found: dict[str, Any]) -> dict[str, Any]:
    """The keys of the design, each the worst over the scenarios; `_gate` is without preemption."""
    scenarios = {name: part for name, part in found.items() if "modes" in part}
    ratios: dict[str, Any] = {}

    def against_alone(mode: str, what: str) -> float:
        p99s = [part["modes"][mode][f"{what}_p99_vs_alone"] for part in scenarios.values()
                if mode in part["modes"]]  # fmt: skip
        return max(one["value"] if one else float("inf") for one in p99s)

    def worst(mode: str, what: str) -> float:
        return float(min(p["modes"][mode][what] for p in scenarios.values() if mode in p["modes"]))

    ran = {mode for part in scenarios.values() for mode in part["modes"]}
    for mode, suffix in (("rose", ""), ("rose_gate", "_gate")):
        if mode in ran:
            for what in ("ttft", "tpot"):
                ratios[f"{what}_p99_vs_alone{suffix}"] = against_alone(mode, what)
            for what in ("slo_attainment", "harvest_efficiency"):
                ratios[f"{what}{suffix}"] = worst(mode, what)
    for mode in ("share_all", AGAIN):
        if mode in ran:
            for what in ("ttft", "tpot"):
                ratios[f"{mode}_{what}_p99_vs_alone"] = against_alone(mode, what)
    ratios["serving_alone_slo_attainment"] = min(
        part["modes"]["serving_alone"]["slo_attainment"] for part in scenarios.values()
    )
    ratios["scheduler_overhead_us"] = max(part["overhead_us"] for part in scenarios.values())
    for part in ("memory", "policies", "orders"):
        ratios |= found.get(part, {}).get("ratios", {})
    return ratios


def machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / (1 << 30), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def main(settings: Settings, say: Say, keep: Keep) -> dict[str, dict[str, list[Run]]]:
    return asyncio.run(run(settings, say, keep))
