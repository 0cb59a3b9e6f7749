"""What is simulated: a fleet, its users, an RL job. Plain facts; `fleet_file` reads a TOML."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rose.executor.slo import Slo
from rose.executor.working_set import LOSS
from rose.plan.engine import EngineModel
from rose.plan.sync import Links
from rose.plan.workload.demand import Demand
from rose.plan.workload.laws import Law
from rose.plan.workload.rollouts import Rollouts
from rose.plan.workload.serving import Sizes
from rose.plan.workload.traffic import Traffic


@dataclass(frozen=True)
class Serving:
    """What every lendable device serves."""

    engine: EngineModel
    slo: Slo
    rate: float
    """Requests a second and device."""
    law: Law
    sizes: Sizes | None
    """None: the law is a record and has them."""
    slo_margin: float = 0.1
    credit_s: float = 0.5
    headroom: float = 0.2
    prefix_hit_rate: float = 0.0
    """Share of prompt tokens that are in the cache if nothing is lent and memory holds them."""
    prefix_return_s: float = 60.0
    """Mean time until somebody comes back to a prefix."""
    prefix_loss: float = LOSS
    """Share of hits that lending may cost, as of the live engine."""


@dataclass(frozen=True)
class RlJob:
    engine: EngineModel
    law: Rollouts
    demand: Demand
    train_s: float
    """Of one step's batch."""
    staleness: int | None = None
    """None: each step waits for all its trajectories. Otherwise versions that a trajectory may be
    behind when it is trained on, and nobody waits."""
    places: float = math.inf
    """Trajectories at once for every device, while each step waits for all of its own."""
    in_flight: float | None = None
    """Trajectories at once in all, while nobody waits; None: as many as KV memory holds."""
    parameters: int = 0
    density: float = 0.01
    """Share of weights that a step changes."""


@dataclass(frozen=True)
class Scenario:
    name: str
    dedicated: int
    """Rollout devices of the job's own; a device is as many GPUs as a model takes."""
    lendable: int
    """Devices that serve and may be lent."""
    trainers: int
    tp: int
    """GPUs of a device."""
    kv_bytes: int
    """Of one device that serves and makes rollouts, beside both models' weights."""
    serving: Serving
    job: RlJob
    links: Links
    slowdown: float = 1.0
    """Of two engines that take turns on a device, against one alone."""
    own_kv_bytes: int | None = None
    """Of one that only makes rollouts; None: the same."""
    steps: int = 3
    longest_s: float = 20_000.0
    """Of traffic that is drawn."""
    alone_s: float = 600.0
    """Of serving alone, for comparison."""
    rest_s: float = 0.0
    """After the last step, until serving has answered who came."""
    arrivals: tuple[Traffic, ...] | None = None
    """Of each device that serves, instead of those that `serving` draws."""
    seed: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    """Where each free number is from, by its name."""
