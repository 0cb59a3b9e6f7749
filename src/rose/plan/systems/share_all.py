"""Serving's devices without any rule: what is at stake."""

from rose.executor.admission import Terms
from rose.plan.system import System

SHARE_ALL = System(
    "share_all",
    "serving's devices, no gate",
    borrows="serving",
    terms=Terms("share_all"),
    sparse=True,
)
