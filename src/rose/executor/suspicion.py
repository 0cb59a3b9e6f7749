"""Is the rollout engine in serving's way? What is looked at, and with how much patience.

The node looks, and so does the serving engine itself, a little more patiently: a node that is dead
takes nothing back.
"""

from __future__ import annotations

from rose.executor.facts import LeaseState
from rose.executor.page import Page
from rose.executor.processes import Writer

STOPPED_S = 1.5
"""A rollout process that stays stopped (SIGSTOP) this long is killed: it sits on memory."""
PRESSURE_S = 2.0
"""Serving may want memory this long before the rollout engine that holds it is killed."""
DISOBEYED_S = 2.5
"""An order to be dormant may be open this long: a step that runs, then turns that end."""
UNSEEN_S = 2.0
"""Memory may be claimed this long beside a serving engine that cannot be seen."""


class Suspicion:
    """Since when something has been wrong with the rollout engine."""

    def __init__(self, patience: float = 1.0) -> None:
        self._patience = patience
        self._since: dict[str, float] = {}
        self.suspect: Writer | None = None
        """The rollout engine, also when the page does not name it any more: its section stays its
        own for as long as it lives."""

    def stuck(self, page: Page, now: float, *, dedicated: bool = False) -> str | None:
        """Why the rollout engine has to be killed, if it has to. What cannot be read holds memory:
        an engine that is well writes its half again."""
        if self.suspect is None or not page.processes.alive(self.suspect):
            self.suspect = page.rollout_writer()
        suspect, rollout = self.suspect, page.rollout()
        if suspect is None or not page.processes.alive(suspect):
            return None
        holds = rollout is None or rollout.facts.kv_claim > 0
        orders = page.node()
        ordered_off = orders is not None and (
            orders.facts.state == LeaseState.DORMANT or not orders.facts.offered
        )
        unseen = not dedicated and page.lending(lambda: now) is None
        # Every clock is asked, so that one that is not wrong any more starts anew.
        found = [
            why
            for why, wrong, limit_s in (
                ("its process is stopped", page.processes.stopped(suspect), STOPPED_S),
                ("it holds memory that serving needs", starved(page), PRESSURE_S),
                ("it did not carry out a revocation", ordered_off and holds, DISOBEYED_S),
                ("it holds memory beside a serving engine unseen", unseen and holds, UNSEEN_S),
            )
            if self._lasting(why, wrong, limit_s * self._patience, now)
        ]
        return found[0] if found else None

    def start_anew(self) -> None:
        """Something was done about it: all patience begins again."""
        self._since.clear()

    def _lasting(self, what: str, wrong: bool, limit_s: float, now: float) -> bool:
        if not wrong:
            self._since.pop(what, None)
            return False
        return now - self._since.setdefault(what, now) > limit_s


def starved(page: Page) -> bool:
    """Whether serving needs memory that the rollout engine still claims."""
    serving, rollout = page.serving(), page.rollout()
    return (
        serving is not None
        and rollout is not None
        and page.processes.alive(serving.writer)
        and rollout.facts.kv_claim > 0
        and serving.facts.kv_need + rollout.facts.kv_claim > page.kv_total
    )
