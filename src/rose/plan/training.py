"""An RL job's steps on a simulated fleet: sample, learn, send weights, and again."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from rose.plan.fleet import Fleet
from rose.plan.outcome import Outcome, StepTime
from rose.plan.progress import Progress
from rose.plan.scenario import Scenario
from rose.plan.sync import Codec, Sync, sync_seconds
from rose.plan.system import System
from rose.plan.workload.demand import Demand, Flags

WARM_STEPS = 2
"""Of an asynchronous job at least, before its steps count."""
MOST_WARM = 30_000
"""Trajectories until then at most: about a minute of simulation."""


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


def synchronous(
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


def asynchronous(
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
