"""The engines that turns can go to: what they run, how fast they are, whether they may be trusted.

Plain bookkeeping without I/O, driven by what the scheduler hears of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rose.scheduler.facts import PLACES, EngineFacts, Speed, Standing
from rose.scheduler.speed import Meter
from rose.scheduler.turn import Cut, Turn

SUSPECT_FIRST_S, SUSPECT_LAST_S = 0.25, 30.0
"""How long an engine that failed gets nothing new; longer every time it fails again."""
MEASURED = 4
"""One in so many gaps between tokens is measured: there are many."""
UNKNOWN = 1 << 30
TYPICAL_TURNS = 8
"""At once, for telling how fast a device is."""
REMEMBERED_CUTS = 32
CUT_MEMORY_S = 300.0
"""Cuts older than this no longer count for an engine's risk."""


@dataclass
class Engine:
    id: str
    url: str
    borrowed: bool = False
    reported: bool = False
    """Its node says whether it takes turns."""
    capacity: int = UNKNOWN
    """Tokens of KV memory; no limit while it is not known."""
    places: int = PLACES
    """Turns that it runs at once."""
    jobs: frozenset[str] = frozenset()
    """That it may serve; any if empty."""
    version: str = ""
    source: tuple[str, str] | None = None
    """Store and job that its versions are of, if it was asked or told."""
    owner: tuple[str, str] | None = None
    """The same, of the jobs that it is for, if jobs have weights of their own."""
    due: dict[str, int] = field(default_factory=dict)
    """Versions that it must have before it gets turns of a job: the current ones when it joined."""
    joined: float = 0.0
    draining: bool = False
    active: bool = True
    """The engine takes turns: it is not dormant."""
    memory: float = 1.0
    """Share of its capacity that it has now: serving may hold the rest."""
    meter: Meter = field(default_factory=Meter)
    turns: dict[str, Turn] = field(default_factory=dict)
    uncached: dict[str, int] = field(default_factory=dict)
    """Prompt tokens to be computed, of turns that have sent nothing yet."""
    expected: dict[str, int] = field(default_factory=dict)
    """Tokens that each turn will hold in the end."""
    prefill_left: int = 0
    context: int = 0
    """Sums of both."""
    heard: float = 0.0
    """When the last token of any turn came."""
    suspect_until: float = 0.0
    _suspect_s: float = SUSPECT_FIRST_S
    _cuts: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_CUTS))

    def serves(self, job: str) -> bool:
        return not self.jobs or job in self.jobs

    def standing(self, now: float) -> Standing:
        if not self.active:
            return Standing.DORMANT
        if self.draining:
            return Standing.DRAINING
        return Standing.SUSPECT if now < self.suspect_until else Standing.READY

    def takes_more(self, now: float) -> bool:
        """Another turn, if it has the memory."""
        slots = self.speed.slots(self.places)
        return self.standing(now) == Standing.READY and len(self.turns) < slots

    def facts(self, now: float) -> EngineFacts:
        return EngineFacts(
            id=self.id,
            borrowed=self.borrowed,
            standing=self.standing(now),
            running=len(self.turns),
            prefill_left=self.prefill_left,
            context=self.context,
            capacity=int(self.capacity * self.memory),
            speed=self.meter.speed,
            revoked_per_s=self._cuts_per_s(now),
            version=self.version,
            places=self.places,
        )

    @property
    def speed(self) -> Speed:
        return self.meter.speed

    @property
    def tokens_per_s(self) -> float:
        return TYPICAL_TURNS / self.speed.token_s(TYPICAL_TURNS)

    def begin(self, turn: Turn, uncached: int, expected: int, now: float) -> None:
        self.turns[turn.ask.id] = turn
        self.uncached[turn.ask.id] = uncached
        self.expected[turn.ask.id] = expected
        self.prefill_left += uncached
        self.context += expected
        self.heard = max(self.heard, now) if len(self.turns) > 1 else now

    def hear(self, turn: Turn, tokens: int, now: float) -> None:
        """Tokens of a turn have come."""
        uncached = self.uncached.pop(turn.ask.id, None)
        if uncached is not None:
            self.prefill_left -= uncached
            if not self.uncached:
                self.meter.first(uncached, now - turn.since)
        elif len(turn.tokens) % MEASURED == 0:
            self.meter.gap(len(self.turns), (now - turn.since) / tokens)
        self.heard = now
        self._suspect_s = SUSPECT_FIRST_S

    def end(self, turn: Turn) -> None:
        self.turns.pop(turn.ask.id, None)
        self.prefill_left -= self.uncached.pop(turn.ask.id, 0)
        self.context -= self.expected.pop(turn.ask.id, 0)

    def fail(self, why: Cut, now: float) -> None:
        """A turn was cut here: for a while nothing new comes, unless it has since begun to."""
        self._cuts.append(now)
        if now >= self.suspect_until:
            self.suspect_until = now + self._suspect_s
            self._suspect_s = min(2 * self._suspect_s, SUSPECT_LAST_S)

    def silent(self, turn: Turn, now: float) -> float:
        """How long nothing has come though something could: no token of any turn, and the prompts
        that are being computed should have been done."""
        due = max(turn.since, self.heard)
        computing = self.prefill_left * self.speed.prefill_s
        return now - due - computing - self.speed.token_s(len(self.turns))

    def has(self, job: str) -> bool:
        """A turn of the job."""
        return any(turn.ask.job == job for turn in self.turns.values())

    def stalls(self, now: float, stall_s: float) -> bool:
        """It has been silent about a turn for longer than that."""
        return any(self.silent(turn, now) > stall_s for turn in self.turns.values())

    def _cuts_per_s(self, now: float) -> float:
        recent = sum(1 for at in self._cuts if now - at < CUT_MEMORY_S)
        return recent / max(60.0, min(CUT_MEMORY_S, now - self.joined)) if recent else 0.0
