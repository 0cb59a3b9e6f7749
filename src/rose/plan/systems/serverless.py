"""Whole devices by the call, as serverless GPUs: a cold start each time, and a limit of time."""

from rose.plan.system import System

COLD_S = 40.0
"""Container and model load. CHOSEN for the 15-26 % of a step that the paper says acquisition takes;
ServerlessLLM reports tens of seconds for models of this size without a local checkpoint."""
LIMIT_S = 300.0
"""Longest that an invocation may last; common limits are 5 to 15 minutes."""

SERVERLESS = System(
    "serverless",
    "serverless devices: a cold start each time",
    borrows="idle",
    placement="least_loaded",
    activate_s=COLD_S,
    keep_s=0.0,
    limit_s=LIMIT_S,
)
