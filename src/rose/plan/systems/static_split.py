"""Half of each serving device, always: safe from surprises, and wasteful on both sides."""

from rose.executor.admission import Terms
from rose.plan.system import System

STATIC_SPLIT = System(
    "static_split",
    "half of serving's devices, always",
    borrows="serving",
    terms=Terms("static_split"),
    sparse=True,
)
