"""Prometheus metrics of a node, read off the page at scrape time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.executor.facts import LeaseState, RolloutFacts, ServingFacts

if TYPE_CHECKING:
    from rose.cluster.node import Node

_REFUSALS = ("busy", "decode", "prefill", "arrival", "memory", "page", "state")


class NodeCollector(Collector):
    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node = self._node
        yield _gauge("rose_node_ready", "1 when both engines are up.", float(node.ready))
        yield _gauge("rose_activate_seconds", "Latest activation.", node.last_activate_s)
        yield _gauge("rose_revoke_seconds", "Latest revocation.", node.last_revoke_s)
        restarts = CounterMetricFamily(
            "rose_engine_restarts", "Engines started again after they died.", labels=["engine"]
        )
        for role, count in node.restarts.items():
            restarts.add_metric([role], count)
        yield restarts
        yield _count("rose_rollout_killed", "Rollout engines killed to free memory.", node.kills)
        yield _gauge("rose_offered", "0 while taken back by its owner.", float(node.offered))
        yield _gauge("rose_kv_total_bytes", "KV memory of the device.", node.page.kv_total)
        seen = node.page.lending(time.monotonic) is not None
        yield _gauge("rose_serving_seen", "1 while serving's facts are good.", float(seen))
        if (serving := node.page.serving()) is not None:
            yield from _of_serving(serving.facts, node.page.processes.alive(serving.writer))
        if (rollout := node.page.rollout()) is not None:
            yield from _of_rollout(rollout.facts, node.page.processes.alive(rollout.writer))


def _of_serving(facts: ServingFacts, alive: bool) -> Iterator[Metric]:
    now = time.monotonic()
    yield _gauge("rose_serving_alive", "1 while the serving engine lives.", float(alive))
    yield _gauge("rose_serving_running", "Serving requests running.", facts.running)
    yield _gauge("rose_serving_waiting", "Serving requests waiting.", facts.waiting)
    slack = GaugeMetricFamily(
        "rose_slack_seconds", "Time left before the tightest serving deadline.", labels=["kind"]
    )
    slack.add_metric(["decode"], facts.decode_deadline - now - facts.next_step_s)
    slack.add_metric(["prefill"], facts.prefill_deadline - now - facts.clear_s)
    slack.add_metric(["arrival"], facts.ttft_s - facts.clear_with_new_s)
    yield slack
    yield from _kv("serving", facts.kv_used, facts.kv_quota)
    yield _gauge("rose_kv_warm_bytes", "Cached prefixes that users come back to.", facts.kv_warm)
    yield _count("rose_prefix_tokens", "Serving's prompt tokens.", facts.prefix_tokens)
    yield _count("rose_prefix_hits", "Of these, found in the prefix cache.", facts.prefix_hits)
    yield _count("rose_prefix_lost", "Tokens not found because of lending.", facts.prefix_lost)
    yield _gauge("rose_prefix_loss", "Share of recent hits lost to lending.", facts.prefix_loss)
    yield from _latency("serving", facts.latency_error, facts.latency_coverage, facts.overhead_us)


def _of_rollout(facts: RolloutFacts, alive: bool) -> Iterator[Metric]:
    yield _gauge("rose_rollout_alive", "1 while the rollout engine lives.", float(alive))
    state = GaugeMetricFamily("rose_lease_state", "1 for the current state.", labels=["state"])
    for one in LeaseState:
        state.add_metric([one.name.lower()], float(facts.state == one))
    yield state
    yield _gauge("rose_rollout_running", "Rollout turns running.", facts.running)
    yield _gauge("rose_rollout_waiting", "Rollout turns waiting.", facts.waiting)
    yield _count("rose_grants", "Rollout steps granted.", facts.granted)
    yield _count("rose_tokens_lent", "Tokens computed in granted steps.", facts.granted_tokens)
    refused = CounterMetricFamily(
        "rose_refusals", "Rollout steps refused, by reason.", labels=["reason"]
    )
    for reason in _REFUSALS:
        refused.add_metric([reason], getattr(facts, f"refused_{reason}"))
    yield refused
    yield _count(
        "rose_late_requests_expected",
        "Serving requests that granted steps made late, in expectation (error budget spent).",
        facts.late_expected,
    )
    ended = CounterMetricFamily("rose_turns_ended", "Turns cut short, by cause.", labels=["cause"])
    ended.add_metric(["reclaimed"], facts.ended_reclaimed)
    ended.add_metric(["revoked"], facts.ended_revoked)
    ended.add_metric(["dormant"], facts.ended_dormant)
    yield ended
    yield _gauge("rose_rollout_preempted", "Preemptions of the turns here.", facts.preempted)
    yield _count("rose_kv_cuts", "Times rollout gave KV memory back.", facts.kv_cuts)
    yield _count("rose_kv_grown", "Times rollout took KV memory.", facts.kv_grown)
    yield _gauge("rose_reclaim_last_seconds", "Latest reclaim.", facts.reclaim_last_ms / 1e3)
    yield from _kv("rollout", facts.kv_used, facts.kv_claim)
    yield from _latency("rollout", facts.latency_error, facts.latency_coverage, facts.overhead_us)


def _kv(engine: str, used: int, quota: int) -> Iterator[Metric]:
    yield _labelled("rose_kv_used_bytes", "KV held by requests.", engine, used)
    yield _labelled("rose_kv_quota_bytes", "KV the engine may use.", engine, quota)


def _latency(engine: str, error: float, coverage: float, overhead: float) -> Iterator[Metric]:
    yield _labelled("rose_latency_error", "Median error of the profile.", engine, error)
    yield _labelled("rose_latency_coverage", "Steps under their bound.", engine, coverage)
    yield _labelled("rose_overhead_seconds", "Our cost per step.", engine, overhead / 1e6)


def _gauge(name: str, help_: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_, value=value)


def _count(name: str, help_: str, value: float) -> Metric:
    return CounterMetricFamily(name, help_, value=value)


def _labelled(name: str, help_: str, engine: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, help_, labels=["engine"])
    family.add_metric([engine], value)
    return family


def registry(node: Node) -> CollectorRegistry:
    mine = CollectorRegistry()
    mine.register(NodeCollector(node))
    return mine
