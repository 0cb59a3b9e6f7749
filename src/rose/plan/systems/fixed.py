"""The job's own devices and no others, as ROLL uses them: turns stay with their engine."""

from rose.plan.system import System

FIXED = System("fixed", "the job's own devices and no others", placement="sticky", dealt=True)
