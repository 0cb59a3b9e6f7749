"""`rose bench executor`: serving alone, rollout alone, share-all, static split, rose, side by side.

For every scenario (load x pattern) the modes run one after the other on the same two engines with
the same arrivals, in an order that rotates with every repeat; samples of a mode are pooled over the
repeats. The SLO of a scenario is `SLO_FACTOR` x the P99 of serving alone, measured in a calibration
run just before. Scenarios that need another size of KV have engines of their own. See
docs/benchmarks.md for the method.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from rose import models
from rose.bench import pressure
from rose.bench.chats import Chats
from rose.bench.colocated import CHAT, MODES, SHORT, Run, Workload, run_mode, settle
from rose.bench.completions import Completions
from rose.bench.summary import AGAIN, line, ratios, slo_from, summary
from rose.bench.surges import Surges
from rose.bench.traffic import Users
from rose.cluster import api
from rose.cluster.config import ConfigError, NodeConfig, parse
from rose.cluster.node import Node
from rose.executor.slo import Slo

FIRST_SLO = Slo(20.0, 5.0)
"""Promises while calibrating: loose, nothing is lent then anyway."""
ORDERS_REPEATED = 20
ROOMY = 0.5
"""GiB of KV where serving's prompts come back: half of it is what users come back to."""
LARGE = 1.0
"""GiB where they are long and nearly all new: a burst and what may come back are half of it."""

BASELINES = ("serving_alone", "rollout_alone")
MAIN_MODES = (*BASELINES, AGAIN, "share_all", "rose", "rose_gate")
"""The other modes, which compare rules, run where the device is busiest and steady."""
LIGHT_MODES = (*BASELINES, AGAIN, "rose", "rose_gate")
"""Where the device is mostly idle: requests are rare, so hundreds of them take long."""
CHAT_MODES = (*BASELINES, "rose", "rose_gate", "idle_gate", "paper_slack")
"""Where serving is hardly ever idle: what is lent is slack or nothing."""
LONGER = 2.0
"""Windows are longer by this where requests are rare: on a lightly loaded device, or long ones."""
DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
QUICK_S = 40.0
QUICK_LONGEST_S = 48.0
QUICK_REQUESTS = 120.0
"""A window of a quick run ends when so many are expected, on devices that are fast enough."""
QUICK_CALIBRATION = 2.0
"""Windows that a quick run's calibration lasts: the P99 of one window's requests is the worst of
them, and a burst more or less decides on it."""
QUICK_ALONE_S = 25.0
QUICK_ORDERS = 6
PROBE_RATES = {
    "short": 0.5,
    "chat": 0.2,
    "shared_prefix": 0.6,
    "long_prompts": 0.5,
    "pressure": 0.7,
}
"""Requests a second while one request's device time is measured."""

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Scenario:
    pattern: Literal["steady", "bursty", "chat", "shared_prefix", "long_prompts", "pressure"]
    load: float
    """Device time that the requests would take one by one, of all time. Served together they take
    less, so that it may exceed 1."""
    modes: tuple[str, ...] = tuple(MODES)
    kv_gb: float | None = None
    """None: that of the settings."""

    @property
    def plain(self) -> bool:
        """Requests have nothing in common but their laws."""
        return self.pattern in ("steady", "bursty", "chat")

    @property
    def requests(self) -> str:
        """The kind of them: scenarios of one kind cost the device the same."""
        return "short" if self.pattern in ("steady", "bursty") else self.pattern

    @property
    def name(self) -> str:
        if not self.plain:
            return self.pattern
        return f"{self.pattern}_{self.load:.0%}".replace("%", "")

    def workload(self, rate: float) -> Workload:
        output = CHAT if self.pattern == "chat" else SHORT
        return Workload(rate, bursty=self.pattern == "bursty", output=output)

    def users(self, rate: float, kv_tokens: int) -> Users:
        """`kv_tokens` fit into the device."""
        match self.pattern:
            case "shared_prefix":
                return Chats(rate)
            case "long_prompts":
                return Completions(rate)
            case "pressure":
                return Surges(rate, kv_tokens)
            case _:
                return self.workload(rate)


SCENARIOS = (
    Scenario("steady", 0.6, tuple(MODES)),
    Scenario("chat", 1.4, CHAT_MODES),
    Scenario("bursty", 0.6, MAIN_MODES),
    Scenario("bursty", 0.2, LIGHT_MODES),
    Scenario("steady", 0.2, LIGHT_MODES),
    Scenario("shared_prefix", 0.55, MAIN_MODES, ROOMY),
    Scenario("long_prompts", 0.55, MAIN_MODES, LARGE),
    Scenario("pressure", 0.5, MAIN_MODES),
)


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
        known = [scenario.name for scenario in SCENARIOS]
        if unknown := set(self.only) - set(known):
            raise ConfigError(f"--scenario {unknown.pop()}: choose from {', '.join(known)}")
        if unknown := set(self.modes) - set(MODES):
            raise ConfigError(f"--mode {unknown.pop()}: choose from {', '.join(MODES)}")
        only = self.only or (("bursty_60",) if self.quick else known)
        return [
            replace(scenario, modes=self._wanted(scenario.modes))
            for scenario in SCENARIOS
            if scenario.name in only
        ]

    def _wanted(self, modes: tuple[str, ...]) -> tuple[str, ...]:
        if self.modes:
            return tuple(mode for mode in MODES if mode in (*BASELINES, AGAIN, *self.modes))
        if self.quick:
            return tuple(mode for mode in modes if mode in MAIN_MODES)
        return modes

    @property
    def only_orders(self) -> bool:
        """Of the parts beside the scenarios: a quick run of named scenarios is for these."""
        return self.quick and bool(self.only)

    def window(self, scenario: Scenario, rate: float = 0.0) -> float:
        """Where requests are rare it takes longer for as many."""
        if self.quick and scenario.plain:
            return QUICK_S
        if self.quick:
            return min(QUICK_LONGEST_S, QUICK_REQUESTS / rate) if rate else QUICK_LONGEST_S
        frequent = scenario.plain and scenario.load > 0.5
        return self.seconds * (1.0 if frequent else LONGER)

    def window_alone(self, window: float) -> float:
        """Of rollouts alone, where no requests are to be counted."""
        return min(window, QUICK_ALONE_S) if self.only_orders else window

    @property
    def rounds(self) -> int:
        return 1 if self.quick else self.repeats

    @property
    def calibrated(self) -> float:
        """Windows of calibration: as many as a mode has."""
        return QUICK_CALIBRATION if self.only_orders else self.rounds

    def by_memory(self) -> dict[float, list[Scenario]]:
        """Scenarios that can have the same engines, by GiB of KV."""
        groups: dict[float, list[Scenario]] = {} if self.only_orders else {self.kv_gb: []}
        for scenario in self.scenarios():
            groups.setdefault(scenario.kv_gb or self.kv_gb, []).append(scenario)
        return groups


def node_config(settings: Settings, kv_gb: float | None = None) -> NodeConfig:
    wanted = {
        "device": settings.device,
        "kv_gb": kv_gb or settings.kv_gb,
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
    found: dict[str, Any] = {}
    runs: dict[str, dict[str, list[Run]]] = {}
    for number, (kv_gb, scenarios) in enumerate(settings.by_memory().items()):
        config = node_config(settings, kv_gb)
        say(f"starting two engines with {settings.model} on {settings.device}, {kv_gb:g} GiB of KV")
        async with _development_routes(), api.running(config) as node:
            psutil.Process().cpu_affinity(list(config.where.host_cores))
            if node.preemption is None:
                say("sub-step preemption does not work on this host: mode `rose` is the gate alone")
            if not number:
                found |= await _device(node, settings, say)
            services: dict[str, float] = {}
            for scenario in scenarios:
                if scenario.requests not in services:
                    services[scenario.requests] = await _service_seconds(
                        node, scenario, settings, say
                    )
                found[scenario.name], runs[scenario.name] = await _scenario(
                    node, scenario, settings, services[scenario.requests], say
                )
                keep(_result(settings, found))
    return runs


@asynccontextmanager
async def _development_routes() -> AsyncIterator[None]:
    """Engines started meanwhile have them: serving's prefix cache can be emptied. All listen on the
    loopback."""
    before = os.environ.get(DEVELOPMENT)
    os.environ[DEVELOPMENT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DEVELOPMENT]
        else:
            os.environ[DEVELOPMENT] = before


async def _device(node: Node, settings: Settings, say: Say) -> dict[str, Any]:
    """What is measured beside the scenarios."""
    if settings.only_orders:
        say("revocation, activation, dormant cost")
        return {"orders": await pressure.orders(node, QUICK_ORDERS)}
    say("memory pressure, revocation, activation, dormant cost")
    quick = settings.quick
    return {
        "memory": await pressure.measure(node, 3 if quick else 10, say),
        "policies": await pressure.compare_policies(node, 1 if quick else 4, say),
        "orders": await pressure.orders(node, QUICK_ORDERS if quick else ORDERS_REPEATED),
    }


def _result(settings: Settings, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "bench": "executor",
        "machine": machine(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()},
        "modes": dict(found),
        "ratios": ratios(found),
    }


async def _service_seconds(node: Node, scenario: Scenario, settings: Settings, say: Say) -> float:
    """Device seconds that one serving request costs when it is alone, for choosing the rate."""
    alone = MODES["serving_alone"]
    warm_s, seconds = (5.0, 25.0) if settings.only_orders else (8.0, 30.0)
    node.promise(FIRST_SLO)
    await run_mode(node, alone, Workload(0.5), warm_s, FIRST_SLO, seed=1)
    probe = scenario.users(PROBE_RATES[scenario.requests], _kv_tokens(node, settings))
    measured = await run_mode(node, alone, probe, seconds, FIRST_SLO, seed=2)
    service = measured.serving_cpu * measured.seconds / len(measured.samples)
    say(f"one serving request alone takes {service:.2f} s of the device")
    return service


def _kv_tokens(node: Node, settings: Settings) -> int:
    return node.page.kv_total // models.kv_bytes_per_token(models.resolve(settings.model))


async def _scenario(
    node: Node, scenario: Scenario, settings: Settings, service: float, say: Say
) -> tuple[dict[str, Any], dict[str, list[Run]]]:
    node.promise(FIRST_SLO)
    users = scenario.users(scenario.load / service, _kv_tokens(node, settings))
    window = settings.window(scenario, users.rate)
    as_long = window * settings.calibrated  # a P99 of as many requests
    calibration = await run_mode(node, MODES["serving_alone"], users, as_long, FIRST_SLO, seed=100)
    slo = slo_from(calibration)
    node.promise(slo)
    say(
        f"{scenario.name}: {users.rate:.2f} req/s, SLO TTFT {slo.ttft_s * 1e3:.0f} ms, "
        f"TPOT {slo.tpot_s * 1e3:.0f} ms"
    )
    runs: dict[str, list[Run]] = {name: [] for name in scenario.modes}
    for repeat in range(settings.rounds):
        order = scenario.modes[repeat % len(scenario.modes) :] + scenario.modes[:repeat]
        for name in dict.fromkeys(order):
            seconds = window
            if name == "rollout_alone":
                if repeat:
                    continue  # no arrivals, no tail: once is enough
                seconds = settings.window_alone(window)
            await settle(node)
            done = await run_mode(node, MODES[name], users, seconds, slo, seed=1000 + repeat)
            runs[name].append(done)
            say(f"  {scenario.name} {repeat + 1}/{settings.rounds} {line(done, slo)}")
    told = {"service_seconds": service, "kv_gb": node.config.kv_gb}
    return told | summary(runs, slo, users), runs


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
