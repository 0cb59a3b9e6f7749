"""The job's own trainers make rollouts while they do not train, after Libra's hybrid pool."""

from rose.plan.system import System

SWITCH_S = 15.0
"""From training to rollout: optimiser state moves out, weights in. Assumed; Libra gives none."""

HYBRID = System(
    "hybrid",
    "trainers make rollouts until they train",
    borrows="trainers",
    order="c_mlfq",
    activate_s=SWITCH_S,
)
