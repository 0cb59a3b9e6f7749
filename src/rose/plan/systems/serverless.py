"""Whole devices by the call, as serverless GPUs: a cold start each time, and a limit of time."""

from rose.plan.system import System

COLD_S = 115.0
"""Container and model load. FITTED to the 15 to 26 % of the time that the paper says acquisition
takes, on 8B GRPO."""
AVAILABLE = 1 / 16
"""Of the devices that ROSE shares with their owner. CHOSEN for rollout times between those of
spot and of the fixed fleet, on 8B GRPO."""
LIMIT_S = 900.0
"""Longest that an invocation may last; common limits are 5 to 15 minutes."""

SERVERLESS = System(
    "serverless",
    "serverless devices: a cold start each time",
    borrows="idle",
    placement="sticky",
    dealt=True,
    available=AVAILABLE,
    activate_s=COLD_S,
    keep_s=0.0,
    limit_s=LIMIT_S,
)
