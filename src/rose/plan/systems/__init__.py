"""All systems by name, each in a file of its own."""

from __future__ import annotations

from rose.plan.system import System
from rose.plan.systems.fixed import FIXED
from rose.plan.systems.fixed_async import FIXED_ASYNC
from rose.plan.systems.hybrid import HYBRID
from rose.plan.systems.published import PUBLISHED
from rose.plan.systems.rose import ROSE
from rose.plan.systems.serverless import SERVERLESS
from rose.plan.systems.share_all import SHARE_ALL
from rose.plan.systems.spot import SPOT
from rose.plan.systems.static_split import STATIC_SPLIT

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        FIXED, FIXED_ASYNC, SPOT, SERVERLESS, HYBRID, SHARE_ALL, STATIC_SPLIT, PUBLISHED,
        ROSE,
    )
}  # fmt: skip
