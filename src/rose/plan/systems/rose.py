"""rose: the rule of `executor.admission`, memory cut to what serving needs, placement by cost."""

from rose.executor.admission import Terms
from rose.plan.system import System
from rose.plan.systems.published import ACTIVATE_S

ROSE = System(
    "rose",
    "rose",
    borrows="serving",
    terms=Terms("rose", error_budget=0.005),
    activate_s=ACTIVATE_S,
    sparse=True,
)
