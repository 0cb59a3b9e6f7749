"""The job's own devices and no others, as ROLL uses them."""

from rose.plan.system import System

FIXED = System("fixed", "the job's own devices and no others", placement="least_loaded")
