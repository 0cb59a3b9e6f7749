"""`rose ps` and `rose top`: what a scheduler says of itself, as tables."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from rose.net import bearer

LOOK_S = 1.0


def ask(url: str, secret: str) -> Any:
    """Raises OSError or ValueError if nobody answers, or no scheduler."""
    where = f"{url.rstrip('/')}/rose/v1/status"
    asked = urllib.request.Request(where, headers=bearer(secret))
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return json.load(answer)


def tables(found: Any) -> Group:
    engines = Table(
        "engine", "jobs", "lease", "standing", "turns", "slots", "version", "ms/token", "cuts/min"
    )
    for one in found["engines"]:
        shown = (one["turns"], one["slots"], one["version"] or "-")
        rates = (f"{one['ms_per_token']:.1f}", f"{one['cuts_per_min']:.1f}")
        names = ", ".join(one["jobs"])
        engines.add_row(one["url"], names, one["lease"], one["standing"], *map(str, shown), *rates)
    jobs = Table("job", "waiting", "held", "running", "version")
    for name, job in found["jobs"].items():
        counts = (job["waiting"], job["held"], job["running"], job["version"] or "-")
        jobs.add_row(name, *map(str, counts))
    return Group(engines, jobs)


def watch(url: str, secret: str, console: Console) -> None:
    """Until interrupted. A scheduler that is away for a moment is waited for."""
    last = ask(url, secret)
    then = time.monotonic()
    with Live(tables(last), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(LOOK_S)
            try:
                found = ask(url, secret)
            except (OSError, ValueError) as error:
                live.update(Group(tables(last), f"[red]{error}[/]"), refresh=True)
                continue
            now = time.monotonic()
            live.update(Group(tables(found), _rates(last, found, now - then)), refresh=True)
            last, then = found, now


def _rates(before: Any, after: Any, seconds: float) -> str:
    def grown(what: str) -> float:
        return float(sum(after[what].values()) - sum(before[what].values())) / seconds

    hits = after["prefix_hit_rate"]
    cached = "" if hits is None else f"   {hits:.0%} of prompts cached"
    return f"{grown('ended'):.1f} turns/s   {grown('cuts'):.1f} cuts/s{cached}"
