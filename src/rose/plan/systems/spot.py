"""Whole devices from a spot market, as RLBoost uses them.

They come late and go without asking; turns that are cut go on elsewhere from their tokens.
"""

from rose.plan.system import System

ACQUIRE_S = 60.0
"""From asking until the engine takes turns: instance, container, model load. CHOSEN for the 7 % of
a step that the paper says acquisition takes."""
LOST_PER_S = 1 / 1800
"""One device in half an hour: spot traces of RLBoost's evaluation have a few an hour."""

SPOT = System(
    "spot",
    "spot devices: come late, are taken away",
    borrows="idle",
    placement="least_loaded",
    activate_s=ACQUIRE_S,
    keep_s=5.0,
    revoked_per_s=LOST_PER_S,
    away_s=120.0,
)
