"""A way to give an RL job devices: what is borrowed, under which rule, at what delay.

Each system that is compared is such a description, in a file of its own in `systems/`. The
policies are the live ones; a system only chooses among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rose.executor.admission import Terms
from rose.scheduler.provisioner import KEEP_S

PLAIN = Terms()


@dataclass(frozen=True)
class System:
    name: str
    says: str
    """In one line, for reports."""
    borrows: Literal["nothing", "serving", "idle", "trainers"] = "nothing"
    """`serving`: the idle part of devices that serve; `idle`: whole devices of somebody else;
    `trainers`: the job's own trainers while they do not train."""
    terms: Terms = PLAIN
    paced: bool = False
    """One executor runs both engines and lets serving's tokens wait until they are due."""
    memory: str = "trim"
    placement: str = "cost"
    order: str = "longest_first"
    dealt: bool = False
    """Trajectories wait for places of the queue they were dealt to, as in ROLL (`places`)."""
    available: float = 1.0
    """Share of the devices that may be borrowed that there are at any time."""
    activate_s: float = 0.0
    keep_s: float = KEEP_S
    revoked_per_s: float = 0.0
    away_s: float = 0.0
    limit_s: float = math.inf
    staleness: int | None = None
    """As of a job: this system's trainer does not wait, whatever the job's does."""
    sparse: bool = False
    """Weights reach borrowed devices as what changed, through a relay, while the step goes on."""
