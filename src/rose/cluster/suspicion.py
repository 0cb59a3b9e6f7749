"""Is the rollout engine in serving's way? What the node looks at, and how much patience it has."""

from __future__ import annotations

import psutil

from rose.executor import priority
from rose.executor.page import Page

STOPPED_S = 2.0
"""A rollout process that stays stopped (SIGSTOP) this long is killed: it sits on memory."""
PRESSURE_S = 3.0
"""Serving may want memory this long before the rollout engine that holds it is killed."""


class Suspicion:
    """Since when something has been wrong with the rollout engine."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def stuck(self, page: Page, now: float) -> str | None:
        """Why the rollout engine has to be killed, if it has to."""
        reading = page.rollout()
        if reading is None or not reading.writer.alive:
            return None
        if self._lasting("stopped", _stopped(reading.writer.pid), STOPPED_S, now):
            return "its process is stopped"
        serving = page.serving()
        starved = (
            serving is not None
            and serving.writer.alive
            and serving.facts.kv_need + reading.facts.kv_claim > page.kv_total
        )
        if starved:
            lift_rollout(page)
        if self._lasting("memory", starved, PRESSURE_S, now):
            return "it holds memory that serving needs"
        return None

    def _lasting(self, what: str, wrong: bool, limit_s: float, now: float) -> bool:
        if not wrong:
            self._since.pop(what, None)
            return False
        return now - self._since.setdefault(what, now) > limit_s


def lift_rollout(page: Page) -> None:
    """Let a rollout engine in the idle class run at normal priority: somebody waits for it."""
    reading = page.rollout()
    if reading is not None and reading.writer.alive and reading.facts.preemptible:
        priority.lift(reading.writer.pid)


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
