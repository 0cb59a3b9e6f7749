"""`metrics.jsonl`: a line for every step of a run, none missing and none twice, whatever is killed.

A step's facts go into its checkpoint before its weights are sent, and to the file afterwards. A
trainer that starts again drops lines of steps that it will do again, and adds the one that it owes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rose.rl.checkpoint import Progress
from rose.rl.learner import Learned
from rose.transfer.publisher import Report

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepFacts:
    """One line of `metrics.jsonl`."""

    step: int
    version: int
    """That the engines have now."""
    reward: float
    """Mean over all episodes of the step."""
    episodes: int
    groups_tried: int
    groups_used: int
    turns: float
    """Mean of an episode."""
    tokens: int
    """That the model made."""
    truncated: float
    """Share of episodes that ran out of turns or context."""
    staleness: int
    """Versions between the oldest token and the weights that learned from it."""
    sample_s: float
    learn_s: float
    step_s: float
    learned: Learned
    sync_s: float = 0.0
    """Until all engines have the new weights, from when the checkpoint was written. This and what
    follows is 0 where the trainer died before it knew."""
    wire_bytes: int = 0
    changed: float = 0.0
    """Share of weights that are different."""
    at: float = field(default_factory=time.time)
    episodes_per_s: float = 0.0
    """Over the whole step."""

    def sent(self, report: Report, before_s: float, sync_s: float) -> StepFacts:
        """With what the weights took, `before_s` after the step began."""
        step_s = before_s + sync_s
        return replace(
            self,
            step_s=step_s,
            sync_s=sync_s,
            wire_bytes=report.stored,
            changed=report.changed / report.elements,
            at=time.time(),
            episodes_per_s=self.episodes / step_s,
        )


def append(folder: Path, facts: StepFacts) -> None:
    with (folder / METRICS).open("a") as file:
        file.write(json.dumps(asdict(facts)) + "\n")


def mend(folder: Path, progress: Progress) -> None:
    """To the steps of the checkpoint that a run goes on from."""
    path = folder / METRICS
    rows = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = {json.loads(row)["step"]: row for row in rows if row.endswith("\n")}
    kept = {step: row for step, row in whole.items() if step <= progress.step}
    if progress.told:
        kept.setdefault(progress.step, json.dumps(progress.told) + "\n")
    if list(kept.values()) != rows:
        path.write_text("".join(kept.values()))
