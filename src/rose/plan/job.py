"""An RL job on a simulated fleet, step by step: sample, learn, send weights, and again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rose.executor.slo import Slo
from rose.plan.device import Device
from rose.plan.fleet import Fleet
from rose.plan.lending import Kind
from rose.plan.progress import Progress
from rose.plan.scenario import Scenario, Serving
from rose.plan.sharing import PERCENTS, Prompts, Sharing
from rose.plan.sync import Codec, Sync, sync_seconds
from rose.plan.system import System
from rose.plan.workload.demand import Demand, Flags
from rose.plan.workload.serving import make_traffic
from rose.plan.workload.traffic import Traffic

NOTHING = Slo(0.0, 0.0)
KNOWN = 5_000
"""Requests from which a serving engine knows how long prompts are."""
BISECTIONS = 12
WARM_STEPS = 2
"""Of an asynchronous job at least, before its steps count."""
MOST_WARM = 30_000
"""Trajectories until then at most: about a minute of simulation."""


@dataclass(frozen=True)
class StepTime:
    rollout_s: float
    train_s: float
    sync_s: float
    seconds: float
    trajectories: int
    """Begun, of use or not."""
    tokens: int
    trained: int
    """Trajectories that the step learned from."""

    @property
    def batches(self) -> float:
        """Sampled for one that is learned from."""
        return self.trajectories / self.trained


@dataclass
class Outcome:
    """What became of a job under a system."""

    system: str
    steps: list[StepTime] = field(default_factory=list)
    began_s: float = 0.0
    """When the first of them did; what was before is not counted."""
    steady: bool = True
    """Otherwise steps are counted though the longest of the first trajectories have not ended."""
    ttft: np.ndarray = field(default_factory=lambda: np.empty(0))
    tpot: np.ndarray = field(default_factory=lambda: np.empty(0))
    slo: Slo = NOTHING
    lent: list[tuple[float, int]] = field(default_factory=list)
    """When how many devices were lent."""
    lent_s: float = 0.0
    activating_s: float = 0.0
    device_s: float = 0.0
    """Rollouts' time on borrowed devices."""
    idle_s: float = 0.0
    """Time that serving left on them while they were lent."""
    longest_s: float = 0.0
    """That a rollout step on a borrowed device may hold serving up."""
    late_expected: float = 0.0
    """Requests that rollout steps were expected to make late when they were granted."""
    cuts: int = 0
    made: int = 0
    """Tokens that engines made for turns."""
    prefix_hits: float = 0.0
    events: int = 0
    busy: float = 0.0
    """Share of the time that serving has had steps on its devices."""
    finished: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Seconds after its step began that each trajectory ended."""

    @property
    def throughput(self) -> float:
        """Trajectories a second that were trained on, over whole steps."""
        return sum(s.trained for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def rollout_s(self) -> float:
        return float(np.mean([s.rollout_s for s in self.steps]))

    def p99(self, what: str) -> float:
        values = getattr(self, what)
        values = values[~np.isnan(values)]
        return float(np.quantile(values, 0.99, method="higher")) if len(values) else math.nan

    @property
    def attainment(self) -> float | None:
        """Share of serving's requests that kept both promises."""
        if not len(self.ttft):
            return None
        return float(np.mean((self.ttft <= self.slo.ttft_s) & (self.tpot <= self.slo.tpot_s)))

    @property
    def harvest(self) -> float | None:
        return self.device_s / self.idle_s if self.idle_s else None

    @property
    def sync_share(self) -> float:
        """Of the steps' time, what sending weights takes."""
        return sum(s.sync_s for s in self.steps) / sum(s.seconds for s in self.steps)

    @property
    def allocation_overhead(self) -> float:
        """Share of the steps' time that devices were asked for and not there yet."""
        asked = self.lent_s + self.activating_s
        return self.activating_s / asked if asked else 0.0


def simulate(scenario: Scenario, system: System, progress: Progress = lambda _: None) -> Outcome:
    """Same scenario and seed: same arrivals and trajectories for every system."""
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(scenario.seed).spawn(3)]
    if scenario.job.staleness is None and system.staleness is not None:
        scenario = replace(scenario, job=replace(scenario.job, staleness=system.staleness))
    devices = _devices(scenario, system)
    fleet = Fleet(devices, _traffic(scenario, devices, streams[0]), _kind(scenario, system),
                  streams[2])  # fmt: skip
    outcome = Outcome(system.name, slo=scenario.serving.slo)
    fleet.watch = lambda: progress(min(1.0, (len(outcome.steps) + fleet.progress) / scenario.steps))
    run = _synchronous if scenario.job.staleness is None else _asynchronous
    run(fleet, scenario, system, streams[1], outcome, progress)
    fleet.pass_time(scenario.rest_s)
    _account(fleet, outcome)
    return outcome


def alone(scenario: Scenario, seconds: float) -> Outcome:
    """Serving without any job beside it."""
    rng = np.random.default_rng(np.random.SeedSequence(scenario.seed).spawn(3)[0])
    nothing = System("serving_alone", "serving alone")
    devices = _devices(replace(scenario, dedicated=0), nothing, serving=True)
    fleet = Fleet(devices, _traffic(scenario, devices, rng), Kind(), rng)
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


def weights(scenario: Scenario, system: System) -> Sync:
    """What one version takes to all engines."""
    engines = scenario.dedicated + (scenario.lendable if system.borrows != "nothing" else 0)
    return sync_seconds(
        scenario.job.parameters,
        scenario.job.density if system.sparse else 1.0,
        scenario.links,
        codec=Codec.ROSE if system.sparse else Codec.DENSE,
        engines=max(1, engines),
        tp=scenario.tp,
        trainer_ranks=scenario.trainers * scenario.tp,
    )


def _synchronous(
    fleet: Fleet, scenario: Scenario, system: System, rng: np.random.Generator, outcome: Outcome,
    progress: Progress,
) -> None:  # fmt: skip
    job, sync = scenario.job, weights(scenario, system)
    batch = job.demand.prompts * job.demand.samples
    ended: list[np.ndarray] = []
    for step in range(scenario.steps):
        began = fleet.now
        useful = job.demand.useful(step, rng)
        plan = job.law.draw(len(useful), job.demand.samples, rng)
        sampling = _Sampling(fleet, job.demand, useful)
        fleet.begin(plan, step, most=sampling.allowed)
        fleet.run(sampling.is_enough)
        if fleet.left:
            fleet.abandon()
        rollout_s = fleet.now - began
        over = ~np.isnan(fleet.ended)
        count, tokens = fleet.started, int(plan.output[np.repeat(over, plan.turns)].sum())
        ended.append(fleet.ended[over] - began)
        if system.borrows == "trainers":
            fleet.lending.release(fleet.now)
        fleet.pass_time(job.train_s + sync.total_s)
        outcome.steps.append(
            StepTime(rollout_s, job.train_s, sync.total_s, fleet.now - began, count, tokens, batch)
        )
        progress((step + 1) / scenario.steps)
    outcome.finished = np.concatenate(ended)


def _asynchronous(
    fleet: Fleet, scenario: Scenario, system: System, rng: np.random.Generator, outcome: Outcome,
    progress: Progress,
) -> None:  # fmt: skip
    """Trajectories of later steps begin while a step is learned, as many as will not be stale.

    At first short ones run ahead of long ones, and steps are too fast. They count when the whole
    first batch has ended: from then on trajectories of every age are under way.
    """
    job, sync = scenario.job, weights(scenario, system)
    assert job.staleness is not None
    batch = job.demand.prompts * job.demand.samples
    batches = max(job.demand.swing(step) for step in (0, scenario.steps))
    most = max(WARM_STEPS, int(MOST_WARM / (batch * batches)))
    groups = math.ceil(job.demand.prompts * batches * (most + scenario.steps + 1 + job.staleness))
    plan = job.law.draw(groups, job.demand.samples, rng)
    stream = _Stream(fleet, job.demand, rng)
    fleet.begin(plan, 0, most=stream.due(batch * (1 + job.staleness)))
    counts, last, step, useless = False, 0.0, 0, 0
    while len(outcome.steps) < scenario.steps:
        step += 1
        fleet.run(partial(stream.has, batch * step))
        waited = fleet.now - last
        if system.borrows == "trainers":
            fleet.lending.release(fleet.now, job.train_s)
        fleet.pass_time(job.train_s + sync.pause_s)
        fleet.learned(step)
        fleet.more(stream.due(batch * (step + 1 + job.staleness)))
        if counts:
            sampled = batch + stream.useless - useless
            tokens = int(plan.output.sum()) * sampled // len(plan)
            outcome.steps.append(
                StepTime(
                    waited, job.train_s, sync.pause_s, fleet.now - last, sampled, tokens, batch
                )
            )
            stream.step = len(outcome.steps)
        elif step >= WARM_STEPS:
            outcome.steady = not np.isnan(fleet.ended[:batch]).any()
            counts = outcome.steady or step == most
            if counts:
                _forget(fleet, outcome)
        last, useless = fleet.now, stream.useless
        progress(len(outcome.steps) / scenario.steps)


def _forget(fleet: Fleet, outcome: Outcome) -> None:
    """What has been used so far: the steps that count begin now."""
    outcome.began_s = fleet.now
    fleet.cuts = fleet.hits = fleet.looked = 0
    for device in fleet.devices:
        device.rollout_s = device.late_expected = 0.0
        device.rolled_tokens = 0
    for one in fleet.lending.lent.values():
        one.lent_s = one.activating_s = one.served_lent_s = 0.0


class _Stream:
    """Trajectories as they end, for a trainer that does not wait for any: which are of use."""

    def __init__(self, fleet: Fleet, demand: Demand, rng: np.random.Generator) -> None:
        self._fleet, self._demand, self._rng = fleet, demand, rng
        self._useful: dict[int, bool] = {}
        """By group, drawn when the first of it ends."""
        self._found = self._due = 0
        self.step = self.useless = 0
        fleet.ends = self._one_more

    def has(self, needed: int) -> bool:
        return self._found >= needed or not self._fleet.left

    def due(self, useful: int) -> int:
        """Trajectories that may begin for so many of use: those without are replaced."""
        self._due = useful
        return useful + self.useless

    def _one_more(self, trajectory: int) -> None:
        group = trajectory // self._demand.samples
        if group not in self._useful:
            self._useful[group] = bool(self._demand.useful(self.step, self._rng)[0])
        if self._useful[group]:
            self._found += 1
        else:
            self.useless += 1
            self._fleet.allow(self.due(self._due))


class _Sampling:
    """A step's groups as they end: which were of use, and how many may begin."""

    def __init__(self, fleet: Fleet, demand: Demand, useful: Flags) -> None:
        self._fleet, self._demand, self._useful = fleet, demand, useful
        self._left = [demand.samples] * len(useful)
        self._found = self._ended = 0
        fleet.ends = self._one_more

    @property
    def allowed(self) -> int:
        """Trajectories."""
        groups = self._demand.allowed(self._found, self._ended - self._found)
        return groups * self._demand.samples

    def is_enough(self) -> bool:
        return self._found >= self._demand.prompts or self._ended == len(self._useful)

    def _one_more(self, trajectory: int) -> None:
        group = trajectory // self._demand.samples
        self._left[group] -= 1
        if not self._left[group]:
            self._ended += 1
            self._found += int(self._useful[group])
            self._fleet.allow(self.allowed)


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


def _since(began: float, timeline: list[tuple[float, int]]) -> list[tuple[float, int]]:
    before = [(0.0, count) for when, count in timeline if when <= began]
    return before[-1:] + [(when - began, count) for when, count in timeline if when > began]
