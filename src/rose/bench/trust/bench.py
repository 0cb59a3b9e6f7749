"""`rose bench trust`: the simulation of a device, planted holes, and the drill on real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rose.bench.executor import machine
from rose.bench.trust import drill, simulate

SEEDS, QUICK_SEEDS = 10_000, 1_000
PLANTED_SEEDS = 1_000
"""Each planted hole must be found within so many histories."""

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    seeds: int = SEEDS
    quick: bool = False
    drilled: bool = True
    out: Path = Path("bench-out")


def main(settings: Settings, say: Say, keep: Keep) -> None:
    result: dict[str, Any] = {
        "bench": "trust",
        "machine": machine(),
        "settings": asdict(settings) | {"out": str(settings.out)},
        "modes": {},
        "ratios": {},
    }
    if settings.drilled:
        report = asyncio.run(drill.run(say, settings.out, quick=settings.quick))
        result["modes"]["drill"] = asdict(report)
        result["ratios"] |= drill.ratios(report) | {"broken_promises": len(report.broken)}
        for broken in report.broken:
            say(f"  BROKEN: {broken}")
        keep(result)
    say(f"simulation: {settings.seeds} histories of a device")
    _simulate(settings, result, say)
    keep(result)


def _simulate(settings: Settings, result: dict[str, Any], say: Say) -> None:
    ratios = result["ratios"]
    with simulate.workers() as pool:
        seen = list(simulate.outcomes(pool, range(settings.seeds), say))
        say(f"planted holes, each with up to {PLANTED_SEEDS} histories")
        found = simulate.found(pool, PLANTED_SEEDS)
    broken = [outcome for outcome in seen if outcome.broken]
    for hole, seed in found.items():
        say(f"  {'seed ' + str(seed) if seed is not None else 'NOT FOUND'}: {hole}")
    result["modes"]["simulation"] = {
        "broken": [asdict(outcome) for outcome in broken],
        "revoke_s_worst": max(outcome.revoke_s for outcome in seen),
        "memory_back_s_worst": max(outcome.memory_back_s for outcome in seen),
        "planted": found,
    }
    ratios["seeds"] = len(seen)
    ratios["broken_promises"] = ratios.get("broken_promises", 0) + len(broken)
    ratios["planted"] = len(found)
    ratios["planted_found"] = sum(seed is not None for seed in found.values())
    ratios["grants_unseen"] = ratios.get("grants_unseen", 0) + sum(o.unseen_launches for o in seen)
