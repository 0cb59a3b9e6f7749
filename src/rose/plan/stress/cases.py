"""The worst patterns as a file of a few numbers each, to be replayed whenever a policy changes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rose.plan.stress.pattern import Pattern
from rose.plan.stress.search import Worst


@dataclass(frozen=True)
class Case:
    pattern: Pattern
    added_late: int
    ttft_excess_s: float
    tpot_excess_s: float


def write(path: Path, found: Iterable[Worst]) -> None:
    cases = [
        Case(one.pattern, one.hurt.added_late, one.hurt.ttft_excess_s, one.hurt.tpot_excess_s)
        for one in found
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(case) for case in cases], indent=2) + "\n")


def read(path: Path) -> list[Case]:
    rows = json.loads(path.read_text())
    return [Case(**(row | {"pattern": Pattern(**row["pattern"])})) for row in rows]
