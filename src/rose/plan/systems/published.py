"""ROSE as published: slack rule, halve and freeze, the turn before, then a borrowed device.

Taken to be one executor for both engines' steps: rollouts as long as both slacks are positive, so
that serving's tokens come when they are due. The paper does not say so; its P99 TPOT beside
rollouts is 0.91 and 0.88 of the SLO (8B, 32B), whatever it is alone.
"""

from rose.executor.admission import Terms
from rose.plan.system import System

ACTIVATE_S = 3.0
"""The paper: under 5 s for a 32B model from dormant; and 0.3 to 0.4 % of the time, which is about
one activation in every step, so nothing is kept while a step is learned."""

PUBLISHED = System(
    "rose_published",
    "ROSE as published",
    borrows="serving",
    terms=Terms("paper_slack"),
    paced=True,
    memory="halve_and_freeze",
    placement="paper",
    order="fifo",
    dealt=True,
    activate_s=ACTIVATE_S,
    keep_s=0.0,
    sparse=True,
)
