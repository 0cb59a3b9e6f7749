"""Whole devices from a spot market, as RLBoost uses them.

They come late and go without asking; turns that are cut go on elsewhere from their tokens.
"""

from rose.plan.system import System

ACQUIRE_S = 30.0
"""From asking until the engine takes turns: instance, container, model load. FITTED to the 7 % of
the time that the paper says acquisition takes, on 8B GRPO."""
AVAILABLE = 1 / 8
"""Of the devices that ROSE shares with their owner, those that the owner leaves alone as a whole.
CHOSEN for the order of systems: it gives 1.03 times ROSE's rollout time on 8B GRPO, where the
paper has 1.20 to 1.26 and says nothing of supply."""
LOST_PER_S = 1 / 1800
"""One device in half an hour: spot traces of RLBoost's evaluation have a few an hour."""

SPOT = System(
    "spot",
    "spot devices: come late, are taken away",
    borrows="idle",
    placement="sticky",
    dealt=True,
    available=AVAILABLE,
    activate_s=ACQUIRE_S,
    keep_s=5.0,
    revoked_per_s=LOST_PER_S,
    away_s=120.0,
)
