"""`rose demo`: two engines on one device under a bursty load, live, and a verdict at the end.

First serving alone (what the users have today), then the same arrivals with rollouts borrowing the
device. Every number shown is measured in this run.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rose.bench import timeline
from rose.bench.colocated import MODES, Run, Workload, run_mode, settle
from rose.bench.executor import FIRST_SLO, Settings, node_config, slo_from
from rose.bench.stats import attainment, percentiles
from rose.cluster import api
from rose.cluster.node import Node
from rose.executor.facts import LeaseState
from rose.executor.slo import Slo

WINDOW_S, DEDICATED_S = 60.0, 15.0
RATE = 0.8
"""Serving requests a second: about 40 % of one core with SmolLM2."""
BAR = 40


class View:
    """The live screen."""

    def __init__(self, node: Node, slo: Slo | None) -> None:
        self.node = node
        self.slo = slo
        self.title = ""
        self.run: Run | None = None

    def watch(self, run: Run) -> None:
        self.run = run

    def __rich__(self) -> Panel:
        serving, rollout = self.node.page.serving(), self.node.page.rollout()
        if serving is None or rollout is None or self.run is None:
            return Panel("starting")
        s, r = serving.facts, rollout.facts
        total = self.node.page.kv_total
        grid = Table.grid(padding=(0, 2))
        grid.add_row("serving", f"{s.running} running, {s.waiting} waiting")
        grid.add_row("", self._latency())
        state = LeaseState(r.state).name.lower()
        grid.add_row("rollout", f"{state}, {r.running} running, {self._speed():.0f} tokens/s")
        refused = r.refused_busy + r.refused_decode + r.refused_prefill + r.refused_arrival
        grid.add_row("gate", f"{r.granted} steps granted, {refused} times told to wait")
        grid.add_row("KV", _bar(r.kv_used / total, r.kv_claim / total, s.kv_used / total))
        grid.add_row("", Text("orange: rollout, blue: serving, grey: free", style="dim"))
        return Panel(grid, title=self.title, width=78)

    def _latency(self) -> str:
        samples = self.run.samples if self.run else []
        ttft = percentiles([s.ttft_s for s in samples if s.ttft_s is not None])
        tpot = percentiles([s.tpot_s for s in samples if s.tpot_s is not None])
        if not (ttft and tpot):
            return "no answer yet"
        line = f"{len(samples)} answered, worst 1 %: TTFT {ttft.p99 * 1e3:.0f} ms"
        line += f", TPOT {tpot.p99 * 1e3:.0f} ms"
        share = attainment(samples, self.slo) if self.slo else None
        return line if share is None else f"{line}, SLO met {share:.1%}"

    def _speed(self) -> float:
        now = time.monotonic()
        produced = self.run.produced if self.run else []
        return sum(tokens for at, tokens in produced if at > now - 3.0) / 3.0


def _bar(rollout: float, claim: float, serving: float) -> Text:
    cells = [round(part * BAR) for part in (rollout, max(0.0, claim - rollout), serving)]
    bar = Text()
    bar.append("█" * cells[0], style="dark_orange")
    bar.append("▒" * cells[1], style="dark_orange")
    bar.append("░" * max(0, BAR - sum(cells)), style="grey50")
    bar.append("█" * cells[2], style="dodger_blue2")
    return bar


async def show(out: Path, console: Console) -> bool:
    """Run the demo; True when serving kept its promise."""
    logging.getLogger("rose").setLevel(logging.WARNING)
    config = node_config(Settings(out=out))
    began = time.monotonic()
    console.print(
        "[bold]rose[/]: one core is the device; a serving engine and a rollout engine "
        "(SmolLM2-135M, stock vLLM) share it.\n"
        "Making the model, measuring its latency profile and starting both engines "
        "(two minutes the first time) ..."
    )
    async with api.running(config) as node:
        psutil.Process().cpu_affinity(list(config.where.host_cores))
        console.print(f"engines up after {time.monotonic() - began:.0f} s; {node.preemption}")
        workload = Workload(rate=RATE, bursty=True)
        view = View(node, None)
        with Live(view, console=console, refresh_per_second=4, transient=True):
            await run_mode(node, MODES["serving_alone"], workload, 6.0, FIRST_SLO, seed=0)
            view.title = "1 of 3: serving alone"
            alone = await run_mode(
                node, MODES["serving_alone"], workload, WINDOW_S, FIRST_SLO, 7, view.watch
            )
            slo = view.slo = slo_from(alone)
            node.promise(slo)
            view.title = "2 of 3: rollout alone, the device for itself"
            dedicated = await run_mode(
                node, MODES["rollout_alone"], workload, DEDICATED_S, slo, 7, view.watch
            )
            await settle(node)
            view.title = "3 of 3: the same serving load, rollouts borrow what is idle"
            mode = MODES["rose"]
            shared = await run_mode(node, mode, workload, WINDOW_S, slo, 7, view.watch)
            taken_back = [await _take_back(node) for _ in range(3)]
        facts = _facts(alone, dedicated, shared, slo, taken_back)
        picture = out / "demo.png"
        timeline.draw([alone, shared], slo, node.page.kv_total, "rose demo", picture)
    kept = _verdict(facts, console)
    report = out / "demo.json"
    report.write_text(json.dumps(facts, indent=2) + "\n")
    console.print(f"picture: {picture}\nnumbers: {report}")
    return kept


async def _take_back(node: Node) -> float:
    await node.activate()
    return await node.revoke()


def _facts(
    alone: Run, dedicated: Run, shared: Run, slo: Slo, taken_back: list[float]
) -> dict[str, Any]:
    def p99(run: Run, name: str) -> float:
        found = percentiles([v for s in run.samples if (v := getattr(s, name)) is not None])
        return found.p99 if found else float("inf")

    speed = shared.rollout_tokens / shared.seconds
    full = dedicated.rollout_tokens / dedicated.seconds
    return {
        "slo": asdict(slo),
        "requests": {"alone": len(alone.samples), "shared": len(shared.samples)},
        "ttft_p99_s": {"alone": p99(alone, "ttft_s"), "shared": p99(shared, "ttft_s")},
        "tpot_p99_s": {"alone": p99(alone, "tpot_s"), "shared": p99(shared, "tpot_s")},
        "slo_attainment": {
            "alone": attainment(alone.samples, slo),
            "shared": attainment(shared.samples, slo),
        },
        "rollout_tok_s": {"dedicated_device": full, "borrowed": speed},
        "idle_alone": 1.0 - alone.serving_cpu,
        "harvest_efficiency": speed / (full * (1.0 - alone.serving_cpu)),
        "revoke_s": taken_back,
    }


def _verdict(facts: dict[str, Any], console: Console) -> bool:
    shown = Table(title="verdict", title_justify="left")
    for column in ("", "serving alone", "with rollouts", "SLO"):
        shown.add_column(column, justify="left" if not column else "right")
    for name, key, limit in (
        ("TTFT p99, ms", "ttft_p99_s", "ttft_s"),
        ("TPOT p99, ms", "tpot_p99_s", "tpot_s"),
    ):
        pair = facts[key]
        shown.add_row(
            name,
            f"{pair['alone'] * 1e3:.0f}",
            f"{pair['shared'] * 1e3:.0f}",
            f"{facts['slo'][limit] * 1e3:.0f}",
        )
    met = facts["slo_attainment"]
    shown.add_row("SLO met", f"{met['alone']:.1%}", f"{met['shared']:.1%}", "")
    speed = facts["rollout_tok_s"]
    shown.add_row("rollout tokens/s", "0", f"{speed['borrowed']:.1f}", "")
    kept = bool(met["shared"] is not None and met["shared"] >= 0.99)
    words = [
        f"The device was {facts['idle_alone']:.0%} idle; rollouts turned that into "
        f"{speed['borrowed']:.0f} tokens/s, {facts['harvest_efficiency']:.0%} of what that idle "
        "time is worth on a dedicated device.",
        f"Taking the device back took {max(facts['revoke_s']) * 1e3:.0f} ms.",
        "[green]Serving kept its promise.[/]" if kept else "[red]Serving missed its promise.[/]",
        f"({facts['requests']['shared']} requests: a P99 here is rough; "
        "`rose bench executor` measures properly.)",
    ]
    console.print(Group(shown, *(Text.from_markup(word) for word in words)))
    return kept
