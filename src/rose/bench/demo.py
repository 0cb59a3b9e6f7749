"""`rose demo`: an agent is trained twice beside a serving engine, on its own device and with rose.

FrozenLake is trained on a dedicated device only, and what serving's users see meanwhile sets the
promises: nothing of their device is lent yet. Then the same again, beside the same bursty load,
with the serving device lent. A live view, a verdict, a report with pictures. Every number shown is
measured in this run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rose import models
from rose.bench import demo_report
from rose.bench.arena import MODES, Arena, Place, Run, Traffic, open_arena
from rose.bench.stats import attainment, percentiles
from rose.executor.facts import LeaseState
from rose.executor.slo import Slo
from rose.rl import report

MODEL, SERVING = "tiny", "small"
RATE = 0.8
"""Serving requests a second: about a fifth of one core."""
WARM_S = 4.0
HOST_BOUND = 0.4
"""Cores of host work from which on two cores have little left to lend."""
TRAINING: dict[str, Any] = {
    "train": {
        "steps": 20,
        "tasks": 16,
        "samples": 8,
        "learning_rate": 5e-4,
        "checkpoint_every": 1000,
        "threads": 1,
        "cores": [1],
    },
    "episodes": {"environment": "frozen_lake", "turns": 12, "turn_tokens": 16, "context": 448},
    "episodes.options": {"p": 0.9},
    "evaluation": {"tasks": 128},
}
KEPT = 0.99
BAR = 40


class View:
    """The live screen."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.title = ""
        self.run: Run | None = None

    def watch(self, run: Run) -> None:
        self.run = run

    def __rich__(self) -> Panel:
        node = self.arena.node
        serving, rollout = node.page.serving(), node.page.rollout()
        grid = Table.grid(padding=(0, 2))
        if serving is not None:
            grid.add_row(
                "serving", f"{serving.facts.running} running, {serving.facts.waiting} waiting"
            )
        if rollout is not None:
            state = LeaseState(rollout.facts.state).name.lower()
            grid.add_row("lent device", f"{state}, {rollout.facts.running} turns")
        if serving is not None and rollout is not None:
            grid.add_row("its memory", self._memory(serving.facts.kv_used, rollout.facts))
        for row in (self.run.steps if self.run else [])[-8:]:
            grid.add_row(
                f"step {row['step']}",
                f"{'█' * round(20 * row['reward']):<20} reward {row['reward']:.2f}, "
                f"{row['episodes_per_s']:.1f} episodes/s",
            )
        return Panel(grid, title=self.title, width=78)

    def _memory(self, serving: int, rollout: Any) -> Text:
        total = self.arena.node.page.kv_total
        parts = (rollout.kv_used, max(0, rollout.kv_claim - rollout.kv_used), serving)
        cells = [round(part / total * BAR) for part in parts]
        bar = Text("█" * cells[0], style="dark_orange")
        bar.append("▒" * cells[1], style="dark_orange")
        bar.append("░" * max(0, BAR - sum(cells)), style="grey50")
        bar.append("█" * cells[2], style="dodger_blue2")
        return bar


@dataclass(frozen=True)
class Outcome:
    """What the verdict is about."""

    slo: Slo
    static: Run
    rose: Run
    taken_back_s: float

    @property
    def facts(self) -> dict[str, Any]:
        runs = {"static": self.static, "rose": self.rose}
        idle = 1.0 - self.static.cpu.serving / self.static.cpu.seconds
        dedicated = self.rose.cpu.rollout.get("dedicated", 0.0) / self.rose.cpu.seconds
        lent = self.rose.cpu.rollout.get("lent", 0.0) / self.rose.cpu.seconds
        return {
            "slo": asdict(self.slo),
            "episodes_per_s": {name: run.episodes_per_s for name, run in runs.items()},
            "throughput_vs_static": self.rose.episodes_per_s / self.static.episodes_per_s,
            "requests": {name: len(run.samples) for name, run in runs.items()},
            "slo_attainment": {n: attainment(r.samples, self.slo) for n, r in runs.items()},
            "ttft_p99_s": {name: _p99(run, "ttft_s") for name, run in runs.items()},
            "tpot_p99_s": {name: _p99(run, "tpot_s") for name, run in runs.items()},
            "device_idle_alone": idle,
            "harvest": {"dedicated_cores": dedicated, "lent_cores": lent, "of_idle": lent / idle},
            "wire_bytes_a_step": {
                n: sum(row["wire_bytes"] for row in r.steps) / len(r.steps) for n, r in runs.items()
            },
            "rewards": {name: [row["reward"] for row in run.steps] for name, run in runs.items()},
            "held_out": {name: run.evaluation for name, run in runs.items()},
            "host_cores": {name: run.cpu.host_cores for name, run in runs.items()},
            "taken_back_s": self.taken_back_s,
        }


def _p99(run: Run, name: str) -> float | None:
    found = percentiles([v for s in run.samples if (v := getattr(s, name)) is not None])
    return found.p99 if found else None


async def show(out: Path, console: Console) -> bool:
    """Run the demo; True when serving kept its promise."""
    logging.getLogger("rose").setLevel(logging.WARNING)
    began = time.monotonic()
    console.print(
        "[bold]rose[/]: core 0 serves, core 1 is the RL job's own rollout device; all engines are "
        "stock vLLM.\nThe models are made and their latency profiles measured the first time, then "
        "the engines start: a minute or two."
    )
    for name in (MODEL, SERVING):
        await asyncio.to_thread(models.resolve, name)
    place = Place(out, MODEL, SERVING, (5, 250))
    async with _arena(place, console) as arena:
        console.print(f"everything is up after {time.monotonic() - began:.0f} s")
        traffic, view = Traffic(RATE), View(arena)
        with Live(view, console=console, refresh_per_second=4, transient=True):
            await arena.serve(traffic, WARM_S, 0)
            view.title = "1 of 2: the agent trains on its own device"
            static = await arena.run(MODES["static"], TRAINING, traffic, 7, view.watch)
            slo = arena.promise(static.samples)
            view.title = "2 of 2: the same again, and the serving device lends its idle time"
            rose = await arena.run(MODES["rose"], TRAINING, traffic, 7, view.watch)
            await arena.node.lend()
            taken_back = await arena.node.take_back()
    outcome = Outcome(slo, static, rose, taken_back)
    kept = _verdict(outcome.facts, console)
    (out / "demo.json").write_text(json.dumps(outcome.facts, indent=2) + "\n")
    demo_report.draw(outcome.facts, {"static": static, "rose": rose}, slo, out / "demo.png")
    report.write(rose.out)
    console.print(f"report: {demo_report.write(outcome.facts, out)}")
    console.print(f"took {time.monotonic() - began:.0f} s")
    return kept


@asynccontextmanager
async def _arena(place: Place, console: Console) -> AsyncIterator[Arena]:
    with console.status("starting") as status:
        opening = open_arena(place, lambda line: status.update(line))
        arena = await opening.__aenter__()
    try:
        yield arena
    finally:
        await opening.__aexit__(None, None, None)


def _limits(facts: dict[str, Any]) -> list[str]:
    host = facts["host_cores"]["rose"]
    if host < HOST_BOUND:
        return []
    return [
        f"HTTP servers, scheduler and agents took {host:.2f} of the two cores, which are the "
        "devices here: a policy this small is bound by them and not by engines, so lending shows "
        "no speed. `rose bench e2e` has one that is large enough."
    ]


def _verdict(facts: dict[str, Any], console: Console) -> bool:
    shown = Table(title="verdict", title_justify="left")
    for column in ("", "own device only", "with rose", "SLO"):
        shown.add_column(column, justify="left" if not column else "right")

    def row(name: str, key: str, form: str, scale: float = 1.0, limit: str = "") -> None:
        pair = facts[key]
        cells = ["-" if v is None else f"{v * scale:{form}}" for v in pair.values()]
        shown.add_row(name, *cells, limit)

    slo = facts["slo"]
    row("RL episodes/s", "episodes_per_s", ".2f")
    for when in ("before", "after"):
        held = [facts["held_out"][name].get(when) for name in ("static", "rose")]
        cells = ["-" if v is None else f"{v:.0%}" for v in held]
        shown.add_row(f"held-out maps solved {when}", *cells, "")
    row("serving TTFT p99, ms", "ttft_p99_s", ".0f", 1e3, f"{slo['ttft_s'] * 1e3:.0f}")
    row("serving TPOT p99, ms", "tpot_p99_s", ".0f", 1e3, f"{slo['tpot_s'] * 1e3:.0f}")
    row("serving requests", "requests", ".0f")
    row("SLO met", "slo_attainment", ".1%")
    row("weights sent a step, MB", "wire_bytes_a_step", ".2f", 1e-6)
    row("host, cores", "host_cores", ".2f")
    met = facts["slo_attainment"]["rose"]
    kept = bool(met is not None and met >= KEPT)
    words = [
        f"RL was {facts['throughput_vs_static']:.2f} times as fast with the serving device lent.",
        f"Serving alone left {facts['device_idle_alone']:.0%} of its device idle; rollouts turned "
        f"{facts['harvest']['of_idle']:.0%} of that into arithmetic.",
        f"Taking the device back took {facts['taken_back_s'] * 1e3:.0f} ms.",
        *_limits(facts),
        "[green]Serving kept its promise.[/]" if kept else "[red]Serving missed its promise.[/]",
        f"({facts['requests']['rose']} requests: a P99 here is rough; `rose bench executor` and "
        "`rose bench e2e` measure properly.)",
    ]
    console.print(Group(shown, *(Text.from_markup(word) for word in words)))
    return kept
