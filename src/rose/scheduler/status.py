"""What the scheduler knows, for people (`rose ps`) and for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rose.scheduler.core import Scheduler
from rose.scheduler.facts import Standing
from rose.scheduler.nodes import Nodes
from rose.scheduler.turn import State

LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


def describe(core: Scheduler, nodes: Nodes) -> dict[str, Any]:
    now = time.monotonic()
    states = Counter((turn.ask.job, turn.state) for turn in core.turns.values())
    return {
        "jobs": {
            name: {
                "waiting": states[name, State.QUEUED],
                "held": len(job.held),
                "running": job.running,
                "version": job.version,
            }
            for name, job in core.jobs.items()
        },
        "engines": [
            {
                "id": engine.id,
                "url": engine.url,
                "jobs": [name for name, job in core.jobs.items() if job.owns(engine)],
                "lease": _lease(nodes, engine.id),
                "standing": engine.standing(now),
                "turns": len(engine.turns),
                "slots": engine.facts(now).slots,
                "version": engine.version,
                "ms_per_token": 1e3 * engine.speed.token_s(len(engine.turns)),
                "cuts_per_min": 60 * engine.facts(now).revoked_per_s,
            }
            for engine in core.engines.values()
        ],
        "cuts": dict(core.cuts),
        "ended": dict(core.ended),
        "prefix_hit_rate": core.hits / core.looked if core.looked else None,
    }


def _lease(nodes: Nodes, id_: str) -> str:
    node = nodes.known.get(id_)
    if node is None:
        return "none"
    return node.lease.phase if node.word.offered else "taken back"


class Exported:
    """Metrics of a scheduler; `seconds` is observed by the front door, by route and status."""

    def __init__(self, core: Scheduler, nodes: Nodes) -> None:
        self._core = core
        self._nodes = nodes
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.seconds = Histogram(
            "rose_scheduler_request_seconds",
            "Of requests at the front door.",
            ["route", "status"],
            buckets=LATENCY_S,
            registry=self.registry,
        )

    def collect(self) -> Iterator[Metric]:
        core, now = self._core, time.monotonic()
        turns = GaugeMetricFamily(
            "rose_scheduler_turns", "Not over, by job and state.", labels=["job", "state"]
        )
        states = Counter((turn.ask.job, turn.state) for turn in core.turns.values())
        for name in core.jobs:
            for state in (State.QUEUED, State.PLACED, State.STREAMING):
                turns.add_metric([name, state], states[name, state])
        yield turns
        engines = GaugeMetricFamily("rose_scheduler_engines", "By standing.", labels=["standing"])
        standings = Counter(engine.standing(now) for engine in core.engines.values())
        for standing in Standing:
            engines.add_metric([standing], standings[standing])
        yield engines
        leases = GaugeMetricFamily(
            "rose_scheduler_devices", "Of nodes that report here.", labels=["lease"]
        )
        for lease, count in Counter(_lease(self._nodes, id_) for id_ in self._nodes.known).items():
            leases.add_metric([lease], count)
        yield leases
        behind = GaugeMetricFamily(
            "rose_scheduler_versions_behind",
            "Of an engine, against the newest of a job that may use it.",
            labels=["job", "engine"],
        )
        for name, job in core.jobs.items():
            for engine in core.engines.values():
                if (versions := job.behind(engine)) is not None:
                    behind.add_metric([name, engine.id], versions)
        yield behind
        placements = CounterMetricFamily(
            "rose_scheduler_placements", "Turns sent to engines, by why there.", labels=["reason"]
        )
        for reason, count in core.reasons.items():
            placements.add_metric([reason], count)
        yield placements
        cuts = CounterMetricFamily(
            "rose_scheduler_turns_cut", "Turns that were cut short and resumed.", labels=["cause"]
        )
        for why, count in core.cuts.items():
            cuts.add_metric([why], count)
        yield cuts
        ended = CounterMetricFamily("rose_scheduler_turns_ended", "By how.", labels=["state"])
        for state, count in core.ended.items():
            ended.add_metric([state], count)
        yield ended
        tokens = CounterMetricFamily(
            "rose_scheduler_prompt_tokens_placed", "Of turns sent to engines."
        )
        tokens.add_metric([], core.looked)
        yield tokens
        cached = CounterMetricFamily(
            "rose_scheduler_prompt_tokens_cached", "Of those, cached there."
        )
        cached.add_metric([], core.hits)
        yield cached
