"""A scenario under a system: devices, users and a job are put together, run and accounted for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rose.executor.slo import Slo
from rose.plan.device import Device
from rose.plan.fleet import Fleet
from rose.plan.lending import Kind
from rose.plan.outcome import Outcome
from rose.plan.progress import Progress
from rose.plan.returning import Returning, visits
from rose.plan.scenario import Scenario, Serving
from rose.plan.sharing import PERCENTS, Prompts, Sharing
from rose.plan.system import System
from rose.plan.training import asynchronous, synchronous
from rose.plan.workload.serving import make_traffic
from rose.plan.workload.traffic import Traffic

KNOWN = 5_000
"""Requests from which a serving engine knows how long prompts are."""
BISECTIONS = 12


def simulate(scenario: Scenario, system: System, progress: Progress = lambda _: None) -> Outcome:
    """Same scenario and seed: same arrivals and trajectories for every system."""
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(scenario.seed).spawn(3)]
    if scenario.job.staleness is None and system.staleness is not None:
        scenario = replace(scenario, job=replace(scenario.job, staleness=system.staleness))
    devices = _devices(scenario, system)
    traffic = _return(scenario, devices, _traffic(scenario, devices, streams[0]))
    fleet = Fleet(devices, traffic, _kind(scenario, system), streams[2])
    outcome = Outcome(system.name, slo=scenario.serving.slo)
    fleet.watch = lambda: progress(min(1.0, (len(outcome.steps) + fleet.progress) / scenario.steps))
    run = synchronous if scenario.job.staleness is None else asynchronous
    run(fleet, scenario, system, streams[1], outcome, progress)
    fleet.pass_time(scenario.rest_s)
    _account(fleet, outcome)
    return outcome


def alone(scenario: Scenario, seconds: float) -> Outcome:
    """Serving without any job beside it."""
    rng = np.random.default_rng(np.random.SeedSequence(scenario.seed).spawn(3)[0])
    nothing = System("serving_alone", "serving alone")
    devices = _devices(replace(scenario, dedicated=0), nothing, serving=True)
    traffic = _return(scenario, devices, _traffic(scenario, devices, rng))
    fleet = Fleet(devices, traffic, Kind(), rng)
    outcome = Outcome("serving_alone", slo=scenario.serving.slo)
    fleet.pass_time(seconds)
    _account(fleet, outcome)
    return outcome


def at_load(scenario: Scenario, load: float, seconds: float = 600.0) -> Scenario:
    """At the rate that keeps a device busy with serving for this share of the time."""

    def busy(rate: float) -> float:
        serving = replace(scenario.serving, rate=rate)
        one = replace(scenario, serving=serving, lendable=1, longest_s=seconds)
        return alone(one, seconds).busy

    low, high = 0.0, 1.0
    while busy(high) < load:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if busy(middle) < load else (low, middle)
    return replace(scenario, serving=replace(scenario.serving, rate=high))


def _devices(scenario: Scenario, system: System, serving: bool = False) -> list[Device]:
    """The job's own first, then those that it may borrow."""
    job, promised, own = scenario.job, scenario.serving, _own_kv(scenario)
    made = [
        Device(i, serving=None, rollout=job.engine, kv_total=own) for i in range(scenario.dedicated)
    ]
    shared = system.borrows == "serving" or serving
    extra = {"nothing": 0, "serving": scenario.lendable, "idle": scenario.lendable,
             "trainers": scenario.trainers}[system.borrows]  # fmt: skip
    sharing = _sharing(scenario, system) if shared else None
    for _ in range(scenario.lendable if serving else extra):
        one = Device(
            len(made),
            serving=promised.engine if shared else None,
            rollout=job.engine,
            kv_total=scenario.kv_bytes if shared else own,
            sharing=sharing,
            headroom=promised.headroom,
            policy=system.memory,
        )
        one.active = False
        made.append(one)
    return made


def _own_kv(scenario: Scenario) -> int:
    return scenario.kv_bytes if scenario.own_kv_bytes is None else scenario.own_kv_bytes


def known(serving: Serving) -> Traffic:
    """Requests from which a serving engine knows what comes."""
    return make_traffic(serving.law, serving.sizes, serving.rate, KNOWN / serving.rate, 0)


def _sharing(scenario: Scenario, system: System) -> Sharing:
    serving = scenario.serving
    seen = known(serving).prompt
    drawn = seen if len(seen) else np.ones(1)
    percentiles = tuple(int(q) for q in np.percentile(drawn, PERCENTS))
    prompts = Prompts(percentiles, int(np.percentile(drawn, 99)), serving.rate)
    lendable = 1.0 - serving.slo_margin
    slo = Slo(serving.slo.ttft_s * lendable, serving.slo.tpot_s * lendable)
    return Sharing(
        system.terms, slo, serving.engine, scenario.job.engine, prompts,
        credit_s=serving.credit_s, slowdown=scenario.slowdown, paced=system.paced,
    )  # fmt: skip


def _traffic(
    scenario: Scenario, devices: list[Device], rng: np.random.Generator
) -> list[Traffic | None]:
    """All devices' users at once, so that bursts meet all of them; dealt out at random."""
    serving, count = scenario.serving, sum(d.serving is not None for d in devices)
    if not count:
        return [None] * len(devices)
    if scenario.arrivals is not None:
        given = iter(scenario.arrivals)
        return [next(given) if device.serving is not None else None for device in devices]
    seed = int(rng.integers(1 << 31))
    whole = make_traffic(serving.law, serving.sizes, serving.rate * count, scenario.longest_s, seed)
    parts = iter(whole.split(count, rng))
    return [next(parts) if device.serving is not None else None for device in devices]


def _return(
    scenario: Scenario, devices: list[Device], traffic: list[Traffic | None]
) -> list[Traffic | None]:
    """Some users come back to the device that they were on before."""
    serving = scenario.serving
    if not serving.prefix_hit_rate:
        return traffic
    rng = np.random.default_rng(np.random.SeedSequence(scenario.seed).spawn(4)[3])
    capacity = scenario.kv_bytes // serving.engine.kv_bytes
    for device, users in zip(devices, traffic, strict=True):
        if users is not None:
            of = visits(users, serving.prefix_hit_rate, serving.prefix_return_s, rng)
            device.returning = Returning(of, capacity, serving.prefix_loss)
    return traffic


def _kind(scenario: Scenario, system: System) -> Kind:
    most = {"nothing": 0, "trainers": scenario.trainers}.get(system.borrows, scenario.lendable)
    most = math.ceil(most * system.available)
    return Kind(
        placement=system.placement,
        order=system.order,
        most_borrowed=most,
        activate_s=system.activate_s,
        keep_s=system.keep_s,
        revoked_per_s=system.revoked_per_s,
        away_s=system.away_s,
        limit_s=system.limit_s,
        places=scenario.job.places,
        in_flight=_in_flight(scenario, system, most),
        dealt=system.dealt and scenario.job.staleness is None,
        gpus=scenario.tp,
    )


def _in_flight(scenario: Scenario, system: System, borrowed: int) -> float:
    """While nobody waits: as stated, or as many as the KV memory of all devices that there may be
    holds. With more, turns find the prefix of the one before thrown away."""
    job, own = scenario.job, _own_kv(scenario)
    if job.staleness is None:
        return math.inf
    if job.in_flight is not None:
        return job.in_flight
    shared = scenario.kv_bytes * (1.0 - scenario.serving.headroom)
    lent = shared if system.borrows == "serving" else own
    held = scenario.dedicated * own + borrowed * lent
    return max(1.0, held / (job.law.context_in_flight() * job.engine.kv_bytes))


def _account(fleet: Fleet, outcome: Outcome) -> None:
    served = fleet.users.served
    outcome.ttft, outcome.tpot = np.array(served.ttft), np.array(served.tpot)
    whole = ~np.isnan(outcome.ttft) & (np.array(served.arrival) >= outcome.began_s)
    outcome.ttft, outcome.tpot = outcome.ttft[whole], outcome.tpot[whole]
    for device in fleet.devices:
        if (one := fleet.lending.lent.get(device.number)) is not None:
            outcome.lent_s += one.lent_s
            outcome.activating_s += one.activating_s
            outcome.device_s += device.rollout_s
            outcome.longest_s = max(outcome.longest_s, device.longest_s)
            outcome.late_expected += device.late_expected
            outcome.idle_s += max(0.0, one.lent_s - one.served_lent_s)
    serve = [d.serving_s for d in fleet.devices if d.serving is not None]
    outcome.busy = float(np.mean(serve)) / fleet.now if serve and fleet.now else 0.0
    outcome.lent = _since(outcome.began_s, fleet.lending.timeline)
    outcome.cuts, outcome.events = fleet.cuts, fleet.events
    outcome.made = sum(device.rolled_tokens for device in fleet.devices)
    outcome.prefix_hits = fleet.hits / fleet.looked if fleet.looked else 0.0
    for returning in [d.returning for d in fleet.devices if d.returning is not None]:
        outcome.asked += returning.tokens
        outcome.found += returning.hits
        outcome.lost += returning.lost


def _since(began: float, timeline: list[tuple[float, int]]) -> list[tuple[float, int]]:
    before = [(0.0, count) for when, count in timeline if when <= began]
    return before[-1:] + [(when - began, count) for when, count in timeline if when > began]
