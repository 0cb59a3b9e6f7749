"""The gate in front of a rollout engine's steps: how long the next one may take, and until when.

The thread aside looks at serving's facts whenever they change and keeps a window; the engine's
thread reads it, sizes its step to it, or waits until it opens. A window that rests on slack of
requests being served is good for one step; one that rests on an idle serving engine stays open. Any
window is void as soon as serving has taken a request that it does not know: the page's arrivals
word is compared before each step. Serving that cannot be seen (unreadable, late, gone, or not the
only one) shuts the gate; only a device without a serving engine asks nobody.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from rose.executor import admission
from rose.executor.admission import Question, Refusal, Terms, Window
from rose.executor.budget import ErrorBudget
from rose.executor.latency import NOTHING, Fit, Step, Tracker
from rose.executor.page import Page

GATE_S = 0.02
"""Longest wait inside `schedule`: bounds how late a new or aborted turn is noticed."""
CLOCKED = 4
"""One of so many steps is timed for the latency model (all of them beside serving): reading the
CPU clock is a system call."""
BLIND = ("share_all", "static_split")
"""Baselines that look at nothing: not at who has come either."""
STEPS_REMEMBERED = 8
"""Rollout steps that may overlap one serving step; without preemption it is hardly ever two."""


class _Decided(NamedTuple):
    window: Window
    fit: Fit
    steps: int
    """Rollout steps that had begun: a window for one step is void when another has since."""
    arrivals: int | None = None
    """Requests that serving had taken; None where nobody can come."""


SHUT = _Decided(admission.shut(Refusal.STATE), NOTHING, 0)


class Gate:
    """`seconds` is the device's clock; `chunk` the most prompt tokens of a step."""

    def __init__(
        self,
        page: Page,
        latency: Tracker,
        seconds: Callable[[], float],
        *,
        dedicated: bool,
        chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refused: Counter[Refusal] = Counter()
        self.risk = 0.0
        """Serving requests that all steps together have made late, in expectation."""
        self._page = page
        self._latency = latency
        self._seconds = seconds
        self._dedicated = dedicated
        self._chunk = chunk
        self._clock = clock
        self._serving_idle_at = 0.0
        self._budget = ErrorBudget()
        self._recent: deque[tuple[float, float]] = deque(maxlen=STEPS_REMEMBERED)
        self.begun = self._ended = 0
        """Steps that the engine has begun, and that are known to have ended."""
        self._decided = SHUT
        self.watchful = True
        """Every step must be told at once: what it took decides on the next one."""
        self.used = SHUT.window
        self.used_at = self.waited_s = 0.0
        self.used_seconds: float | None = None
        """Of the last `tokens`: the window, when, how long it waited, and the device's clock on
        steps that are timed."""
        self._changed = threading.Event()

    # ---- the engine's thread

    def tokens(self, decode: int) -> int:
        """Most tokens of a step with that many running turns; 0 if the gate stays shut."""
        deadline = math.inf
        self.waited_s = 0.0
        while True:
            decided, now = self._decided, self._clock()
            if tokens := self.granted(decode, now):
                return tokens
            deadline = min(deadline, now + GATE_S)
            if now >= deadline:
                self.refused[decided.window.binding] += 1
                return 0
            self._changed.clear()
            if self._decided is decided:
                self._changed.wait(deadline - now)
            self.waited_s += self._clock() - now

    def granted(self, decode: int, now: float) -> int:
        """Tokens of a step that begins now, if one may."""
        decided = self._decided
        window = decided.window
        if now > window.until or (window.once and decided.steps != self.begun):
            return 0
        tokens = decided.fit.tokens(decode, self._chunk)
        if not tokens or not self._knows_all(decided):
            return 0
        self.used, self.used_at = window, now
        clocked = self.watchful or self.begun % CLOCKED == 0
        self.used_seconds = self._seconds() if clocked else None
        return tokens

    def void(self) -> None:
        """What was decided holds no more, until it is looked at again."""
        self._decided = SHUT

    def _knows_all(self, decided: _Decided) -> bool:
        return decided.arrivals is None or decided.arrivals == self._page.arrivals()

    # ---- the thread aside

    def end(self, window: Window, step: Step, began: float, ended: float) -> None:
        self._ended += 1
        self._recent.append((began, ended))
        risk = window.risk(self._latency.upper(step))
        self._budget.spend(risk)
        self.risk += risk

    def decide(
        self,
        terms: Terms,
        *,
        active: bool,
        turns: int,
        context: int,
        give_back_s: float = 0.0,
    ) -> float:
        """Look again: something may have changed. Returns until when the decision holds."""
        begun, latency = self.begun, self._latency
        window, arrivals = SHUT.window, None
        if active and self._dedicated:
            window = admission.OPEN
        elif active:
            worth = latency.upper(Step(0, turns, context))
            window, arrivals = self._window(terms, worth, give_back_s)
        if window.once and begun != self._ended:
            window = admission.shut(Refusal.BUSY)  # our own step in flight takes of that slack
        fit = self._latency.within(window.seconds, context)
        self._decided = _Decided(window, fit, begun, arrivals)
        self.watchful = window.once or window.seconds <= 0
        self._changed.set()
        return window.until

    def _window(
        self, terms: Terms, worth_s: float, give_back_s: float
    ) -> tuple[Window, int | None]:
        """The window, and the arrivals that it knows."""
        reading = self._page.lending(self._clock)
        if reading is None:
            return admission.shut(Refusal.PAGE), None
        now = self._clock()
        facts = reading.facts
        if not facts.busy:
            self._serving_idle_at = now
        self._budget.allow(terms.error_budget)
        self._budget.earn(facts.arrived)
        occupied = sum(max(0.0, end - max(begin, facts.step_began)) for begin, end in self._recent)
        latency = self._latency
        window = admission.window(
            Question(
                facts,
                terms,
                now,
                occupied_s=occupied,
                allowance=self._budget.left,
                likely=latency.likely.margin / latency.margin,
                worth_s=worth_s,
                busy_s=now - self._serving_idle_at,
                give_back_s=give_back_s,
            )
        )
        if terms.rule in BLIND:
            return window, None
        return window, facts.arrivals
