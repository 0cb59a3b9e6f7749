"""Pictures from a run's files; the watcher's look at a fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rose.rl import report, watch
from rose.rl.learner import Learned
from rose.rl.metrics import METRICS, StepFacts

LEARNED = Learned(0.0, 1.0, 0.0, 1e-7, 1e-6, 1.0, 0.5, 100)


def facts(step: int, **more: Any) -> StepFacts:
    given = {
        "step": step, "version": step, "reward": 0.1 * step, "episodes": 64, "groups_tried": 8,
        "groups_used": 8, "turns": 5.0, "tokens": 900, "truncated": 0.0, "staleness": 0,
        "sample_s": 9.0, "learn_s": 2.0, "sync_s": 0.2, "step_s": 11.5, "episodes_per_s": 5.6,
        "wire_bytes": 10**6, "changed": 0.02, "learned": LEARNED,
    }  # fmt: skip
    return StepFacts(**given | more)


def test_a_line_says_what_people_look_for() -> None:
    shown = report.line(facts(3))
    for part in ("step   3", "reward 0.300", "64 episodes", "5.60/s", "sync 0.20 s", "1.0e-07"):
        assert part in shown


def test_pictures_are_made_of_what_there_is(tmp_path: Path) -> None:
    from dataclasses import asdict

    assert report.write(tmp_path) == []
    lines = [json.dumps(asdict(facts(i))) for i in (1, 2, 3)]
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"step": 4, "half')
    look = watch.Look(0.0, 3, 5, 1, 1, 2, 0.2, 1 << 28, 1 << 20, 1 << 24)
    rows = [asdict(look) | {"at": float(i), "slack_s": None if i == 1 else 0.2} for i in range(4)]
    (tmp_path / watch.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(report.read(tmp_path / METRICS)) == 3
    pictures = report.write(tmp_path)
    assert [p.name for p in pictures] == ["training.png", "fleet.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_a_deadline_that_is_never_has_no_slack() -> None:
    def page(decode: float | None, prefill: float | None) -> dict[str, Any]:
        serving = {"decode_deadline": decode, "prefill_deadline": prefill, "written": 10.0,
                   "next_step_s": 0.1, "clear_s": 0.3}  # fmt: skip
        return {"serving": serving}

    assert watch._slack([page(None, None)]) is None
    assert watch._slack([page(10.5, None), page(None, 10.5)]) == 10.5 - 10.0 - 0.3
