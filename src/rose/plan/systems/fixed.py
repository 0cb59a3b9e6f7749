"""The job's own devices and no others: ROLL when it waits for every trajectory, AReaL when not."""

from rose.plan.system import System

FIXED = System("fixed", "the job's own devices and no others", placement="least_loaded")
