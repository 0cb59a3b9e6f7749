"""The job's own devices, and a trainer that does not wait for the longest trajectories: AReaL.

Trajectories of later steps begin while a step is learned, as long as none will be staler than one
version when it is trained on. What asynchrony alone gains, without any device of somebody else.
"""

from dataclasses import replace

from rose.plan.systems.fixed import FIXED

FIXED_ASYNC = replace(
    FIXED,
    name="fixed_async",
    says="the job's own devices, asynchronous",
    staleness=1,
)
