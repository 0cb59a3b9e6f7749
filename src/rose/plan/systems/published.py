"""ROSE as published: slack rule, halve and freeze, the turn before, then a borrowed device."""

from rose.executor.admission import Terms
from rose.plan.system import System

ACTIVATE_S = 3.0
"""The paper: under 5 s for a 32B model from dormant."""

PUBLISHED = System(
    "rose_published",
    "ROSE as published",
    borrows="serving",
    terms=Terms("paper_slack"),
    memory="halve_and_freeze",
    placement="paper",
    order="fifo",
    activate_s=ACTIVATE_S,
    sparse=True,
)
