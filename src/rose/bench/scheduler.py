"""`rose bench scheduler`: what the scheduler adds to a turn, and what its placement is worth.

    agents (trajectories of real agents, smaller and faster) -> rose scheduler -> emulated engines

All over HTTP, each a process of its own. Engines keep the time of a real one, model its prefix
cache, and log how long every request took them, so what is left of a client's time is the way there
and the scheduler. The same agents straight to the engines say how much of that is the way. See
docs/benchmarks.md for the method.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import uvloop

from rose.bench import fleets, trajectories
from rose.bench.agents import Agents, Record
from rose.bench.emulated import Attempt
from rose.bench.executor import machine
from rose.bench.fleets import Door, Fleet
from rose.bench.stats import percentiles
from rose.bench.trajectories import Trajectory, Turn
from rose.scheduler.facts import Speed

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]

USUAL = Speed(step_s=0.02, turn_s=0.002, prefill_s=0.001)
CROWDED = Speed(step_s=0.005, turn_s=0.005, prefill_s=0.0005)
"""More turns make such an engine no faster, so they wait in the scheduler's queue."""
QUICK = Speed(step_s=0.002, turn_s=0.0001, prefill_s=0.0)
GROUP = 8
TOKENS, SECONDS = 0.1, 0.1
"""Trajectories are smaller and their tools faster than recorded ones by this."""
LONGEST = 8_000
"""Tokens of a trajectory."""
PLACEMENTS = ("cost", "paper", "least_loaded", "round_robin", "sticky")
ORDERS = ("longest_first", "c_mlfq", "fifo")
IDLE_PROMPT = 500
BEFORE_KILL_S = 2.0
WARM_S = 4.0
"""All trajectories begin at once, which they never do again: what a turn costs is counted later."""


@dataclass(frozen=True)
class Settings:
    record: Path | None = None
    """Agents' calls; drawn if None."""
    seconds: float = 20.0
    """Windows of the parts that have no end of their own."""
    repeats: int = 1
    quick: bool = False
    out: Path = Path("bench-out")

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Engines and live trajectories."""
        return ((8, 64),) if self.quick else ((8, 256), (64, 2000), (64, 256))

    @property
    def rounds(self) -> int:
        return 1 if self.quick else self.repeats

    def workload(self, count: int) -> list[Trajectory]:
        some = (
            trajectories.recorded(self.record)
            if self.record
            else trajectories.drawn(64, np.random.default_rng(0))
        )
        return trajectories.workload(some, count, GROUP, TOKENS, SECONDS, LONGEST)


async def run(settings: Settings, say: Say, keep: Keep) -> None:
    """Measure everything; `keep` gets the result so far after every part."""
    fleets.away_from_the_scheduler()
    modes: dict[str, Any] = {}
    (few, _), (many, live) = settings.sizes[0], settings.sizes[-1]
    settings.out.mkdir(parents=True, exist_ok=True)
    log = settings.out / "engines.log"

    def done(name: str, found: Any) -> None:
        modes[name] = found
        shown = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
        result = {"bench": "scheduler", "machine": machine(), "settings": shown, "modes": modes}
        keep(result | {"ratios": _ratios(modes)})

    with TemporaryDirectory() as name:
        folder = Path(name)
        for engines, count in settings.sizes:
            async with fleets.fleet(engines, log) as fleet:
                work = settings.workload(count)
                found = await _overhead(fleet, folder, work, settings.seconds, say)
                done(f"overhead_{engines}_{count}", found)
        async with fleets.fleet(many, log) as fleet:
            done("throughput", await _throughput(fleet, folder, settings.seconds, say))
            done("idle", await _idle(fleet, folder, 10 * live, say))
            done("restart", await _restart(fleet, folder, 8 * live, say))
            for part, taken in (("placement", False), ("placement_revoked", True)):
                compared = {policy: ("--placement", policy) for policy in PLACEMENTS}
                work = settings.workload(live)
                rounds = settings.rounds if taken else 1
                found = await _compare(fleet, folder, USUAL, work, compared, rounds, taken, say)
                done(part, found)
        async with fleets.fleet(few, log) as fleet:
            compared = {order: ("--order", order) for order in ORDERS}
            work = settings.workload(live)
            found = await _compare(fleet, folder, CROWDED, work, compared, 1, False, say)
            done("order", found)


# ---- the parts


async def _overhead(
    fleet: Fleet, folder: Path, work: list[Trajectory], seconds: float, say: Say
) -> dict[str, Any]:
    """Agents through the scheduler, and the same straight to the engines."""
    found: dict[str, Any] = {}
    await fleet.prepare(USUAL)
    agents = Agents("direct", lambda number: fleet.urls[number % len(fleet.urls)], stream=True)
    record = (await agents.run(work, WARM_S + seconds)).after(WARM_S)
    found["direct"] = _summary(record, await fleet.attempts())
    async with fleets.door(fleet, folder) as door:
        await fleet.prepare(USUAL)
        everything, cpu_s = await _through(door, "through", work, WARM_S + seconds)
        steady = everything.after(WARM_S)
        found["through"] = _summary(steady, await fleet.attempts()) | _cost(everything, cpu_s)
    for part in ("p50", "p99"):
        ours, way = (found[name]["beside_engine_ms"][part] for name in ("through", "direct"))
        found[f"overhead_ms_{part}"] = max(0.0, ours - way)
    say(
        f"{len(fleet.urls)} engines, {len(work)} trajectories: "
        f"+{found['overhead_ms_p50']:.1f} ms (P99 +{found['overhead_ms_p99']:.1f}) a turn, "
        f"{found['through']['turns_per_s']:.0f} turns/s, "
        f"{found['through']['cpu_ms_per_turn']:.2f} ms of the scheduler each"
    )
    return found


async def _throughput(fleet: Fleet, folder: Path, seconds: float, say: Say) -> dict[str, Any]:
    """Short turns, one after the other: as many as the scheduler can."""
    await fleet.prepare(QUICK)
    work = [Trajectory(number, 64, (Turn(16, 0.0, 1),) * 100_000) for number in range(256)]
    async with fleets.door(fleet, folder) as door:
        await _through(door, "warm", work, seconds / 4)
        record, cpu_s = await _through(door, "short", work, seconds)
        found = _summary(record, await fleet.attempts()) | _cost(record, cpu_s)
    say(
        f"short turns: {found['turns_per_s']:.0f} turns/s, "
        f"{found['cpu_ms_per_turn']:.2f} ms of the scheduler each"
    )
    return found


async def _idle(fleet: Fleet, folder: Path, count: int, say: Say) -> dict[str, Any]:
    """Trajectories that had a turn and are with their tool: memory that each keeps."""
    await fleet.prepare(QUICK)
    turn = (Turn(16, 0.0, 1),)
    async with fleets.door(fleet, folder) as door:
        sizes = []
        for part in range(3):
            work = [Trajectory(part * count + n, IDLE_PROMPT, turn) for n in range(count)]
            await _through(door, f"idle{part}", work, None)
            sizes.append(door.used[1])
    kb = (sizes[2] - sizes[1]) / count / 1024  # the first also warms everything up
    say(f"an idle trajectory keeps {kb:.1f} KB")
    return {"trajectories": count, "bytes": sizes, "kb_each": kb}


async def _restart(fleet: Fleet, folder: Path, count: int, say: Say) -> dict[str, Any]:
    """kill -9 with turns at all engines; until it answers, and until they all have gone on."""
    await fleet.prepare(Speed(step_s=0.1, turn_s=0.002, prefill_s=0.0))
    work = [Trajectory(n, IDLE_PROMPT, (Turn(80, 0.0, 1),)) for n in range(count)]
    async with fleets.door(fleet, folder) as door:
        agents = Agents("restart", lambda _: door.url)
        going = asyncio.create_task(agents.run(work))
        await _running(door, count)
        await asyncio.sleep(BEFORE_KILL_S)
        words = (sys.executable, "-m", "rose.bench.probe", door.url, str(count))
        probe = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        await asyncio.sleep(1.0)
        door.kill()
        killed = time.monotonic()
        door.spawn()  # at once: clients that lost it would keep this process busy first
        seen = msgspec.json.decode((await probe.communicate(b"\n"))[0])
        answers_s, resumed_s = seen["answers"] - killed, seen["resumed"] - killed
        record = await going
        found = _summary(record, await fleet.attempts())
    say(f"restart with {count} live: answers after {answers_s:.1f} s, all go on at {resumed_s:.1f}")
    return found | {"trajectories": count, "answers_s": answers_s, "resumed_s": resumed_s}


async def _running(door: Door, count: int) -> None:
    while True:
        if (await door.status())["jobs"]["default"]["running"] >= count:
            return
        await asyncio.sleep(0.1)  # asking takes the scheduler a while


async def _compare(
    fleet: Fleet,
    folder: Path,
    speed: Speed,
    work: list[Trajectory],
    policies: Mapping[str, tuple[str, ...]],
    rounds: int,
    revoked: bool,
    say: Say,
) -> dict[str, Any]:
    """The same trajectories to their end under each policy, in an order that rotates."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in policies}
    for number in range(rounds):
        names = list(policies)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            await fleet.prepare(speed)
            async with fleets.door(fleet, folder, *policies[name]) as door:
                taking = asyncio.create_task(fleet.take_back(number)) if revoked else None
                record, _ = await _through(door, f"{name}{number}", work, None)
                if taking is not None:
                    taking.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await taking
                runs[name].append(_summary(record, await fleet.attempts()))
            last = runs[name][-1]
            say(
                f"  {name:<14} {last['makespan_s']:6.1f} s, {last['prefix_hit_rate']:.1%} cached, "
                f"{last['cut']} turns cut, {last['lost'] + last['wrong']} lost or wrong"
            )
    return {
        name: {
            "makespan_s": median(one["makespan_s"] for one in repeats),
            "prefix_hit_rate": median(one["prefix_hit_rate"] for one in repeats),
            "runs": repeats,
        }
        for name, repeats in runs.items()
    }


async def _through(
    door: Door, name: str, work: list[Trajectory], seconds: float | None
) -> tuple[Record, float]:
    """What came of it, and CPU seconds of the scheduler."""
    before = door.used[0]
    record = await Agents(name, lambda _: door.url).run(work, seconds)
    return record, door.used[0] - before


# ---- what was measured


def _summary(record: Record, attempts: list[tuple[str, Attempt]]) -> dict[str, Any]:
    engine_s: defaultdict[str, float] = defaultdict(float)
    for id_, attempt in attempts:
        engine_s[id_] += attempt.seconds
    whole = Counter(id_ for id_, attempt in attempts if attempt.whole)
    beside = [(one.ended - one.began - engine_s[one.id]) * 1e3 for one in record.asked]
    found = percentiles(beside)
    read = sum(attempt.prompt for _, attempt in attempts)
    return {
        "turns": len(record.asked),
        "turns_per_s": len(record.asked) / record.makespan_s,
        "makespan_s": record.makespan_s,
        "beside_engine_ms": asdict(found) if found else None,
        "prefix_hit_rate": sum(attempt.cached for _, attempt in attempts) / max(1, read),
        "lost": record.lost,
        "wrong": record.wrong,
        "retries": record.retries,
        "duplicated": sum(count - 1 for count in whole.values()),
        "cut": sum(not attempt.whole for _, attempt in attempts),
    }


def _cost(record: Record, cpu_s: float) -> dict[str, float]:
    return {
        "cpu_ms_per_turn": cpu_s / max(1, len(record.asked)) * 1e3,
        "cpu_share": cpu_s / record.makespan_s,
    }


def _ratios(modes: dict[str, Any]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for name, found in modes.items():
        if name.startswith("overhead_"):  # the last one is the one that counts
            ratios |= {key: found[key] for key in ("overhead_ms_p50", "overhead_ms_p99")}
    if "throughput" in modes:
        ratios["turns_per_s"] = modes["throughput"]["turns_per_s"]
    if "idle" in modes:
        ratios["idle_trajectory_kb"] = modes["idle"]["kb_each"]
    if "restart" in modes:
        ratios["restart_s"] = modes["restart"]["answers_s"]
    if (found := modes.get("placement_revoked")) is not None:
        cost = found["cost"]
        for other in ("round_robin", "sticky", "least_loaded", "paper"):
            ratios[f"makespan_vs_{other}"] = cost["makespan_s"] / found[other]["makespan_s"]
        ratios["prefix_hit_rate"] = cost["prefix_hit_rate"]
        behind = found["sticky"]["prefix_hit_rate"] - cost["prefix_hit_rate"]
        ratios["prefix_hit_points_behind_sticky"] = 100 * behind
    if (found := modes.get("order")) is not None:
        for name in ("longest_first", "c_mlfq"):
            ratios[f"makespan_{name}_vs_fifo"] = (
                found[name]["makespan_s"] / found["fifo"]["makespan_s"]
            )
    every = list(_runs(modes))
    ratios["lost_turns"] = sum(one["lost"] for one in every)
    ratios["duplicated_turns"] = sum(one["duplicated"] for one in every)
    ratios["token_exact"] = float(not any(one["wrong"] for one in every))
    return ratios


def _runs(found: Any) -> Iterator[dict[str, Any]]:
    """All summaries in there."""
    if isinstance(found, dict):
        if "duplicated" in found:
            yield found
        else:
            for part in found.values():
                yield from _runs(part)
    elif isinstance(found, list):
        for part in found:
            yield from _runs(part)


def main(settings: Settings, say: Say, keep: Keep) -> None:
    uvloop.run(run(settings, say, keep))
