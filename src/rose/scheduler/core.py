"""The scheduler itself, without I/O: told what happens and when, says what to do.

    submit      a client's turn comes in
    arrived     an engine sent something of a turn
    cut         an engine, or the way to it, failed a turn
    cancel      the client no longer wants it
    join, leave, and the fields of `Engine`: what is known of engines
    decide      what to do now: turns to start, turns to stop

The live process (`service`) and the simulation run this very code. It never waits, never looks at
a clock and draws no random numbers. A turn that was taken is never lost: it is in a
queue, at an engine, or over.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from rose.scheduler import order, placement, prefixes, provisioner
from rose.scheduler.facts import Standing
from rose.scheduler.fleet import Engine
from rose.scheduler.job import Job
from rose.scheduler.order import Waiting
from rose.scheduler.placement import Placing, Reason
from rose.scheduler.prefixes import Prefixes
from rose.scheduler.trajectories import Trajectories
from rose.scheduler.turn import Ask, Chunk, Cut, State, Turn

STALL_S = 2.0
"""As in the paper: an engine that sends nothing for so long does not work."""
LOOK_FOR_STALLS_S = 0.25
"""Every turn at every engine is looked at: not at every event."""
GHOSTS = 8
"""Entries of a queue per turn that really waits, before it is made anew."""
LOOK_FURTHER = 8
"""Turns behind one that cannot be placed which are tried before waiting."""
MOST_STARTS = 64
"""Turns placed at once: deciding on a thousand would keep everybody else waiting for a second."""
CUT_REASONS = ("abort", "error")
"""Ends that are not the turn's own."""


@dataclass(frozen=True)
class Rules:
    placement: str = "cost"
    order: str = "longest_first"
    stall_s: float = STALL_S
    most_waiting: int = 10_000
    """Turns that may wait, per job; more are refused for now."""


class Start(NamedTuple):
    turn: Turn
    engine: Engine
    salt: str


class Stop(NamedTuple):
    """Nobody wants what this attempt may still send."""

    turn: Turn
    engine: Engine
    attempt: int


class Crowd(NamedTuple):
    """Of the turns that wait."""

    more_than_places: bool
    ahead: Counter[str | None]
    """How many that were looked at before wait for which engine."""


class Full(Exception):
    """More turns wait than may; try again later."""


class Scheduler:
    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.jobs: dict[str, Job] = {}
        self.engines: dict[str, Engine] = {}
        self.turns: dict[str, Turn] = {}
        """That are not over, and over ones that nobody has fetched yet (`forget`)."""
        self.prefixes = Prefixes()
        self.cuts: Counter[Cut] = Counter()
        self.ended: Counter[State] = Counter()
        self.reasons: Counter[Reason] = Counter()
        """Of placements."""
        self.hits = self.looked = 0
        """Prompt tokens that engines had cached, and all, of turns placed."""
        self._trajectories = Trajectories()
        self._stops: list[Stop] = []
        self._numbers = itertools.count()
        self.unfinished = False
        """The last `decide` placed as many as it may at once: there may be more."""
        self._placed = 0
        self._stalls_at = 0.0

    # ---- turns

    def submit(self, ask: Ask, now: float) -> Turn:
        """Take a turn; one that is known is the same turn, whatever is asked the second time."""
        if (known := self.turns.get(ask.id)) is not None:
            return known
        job = self.jobs[ask.job]
        if job.waiting >= self.rules.most_waiting:
            raise Full(f"job {job.name} has {job.waiting} turns waiting")
        turn = self.turns[ask.id] = Turn(ask, now, since=now)
        self._queue(turn)
        return turn

    def restore(self, turn: Turn, now: float) -> None:
        """Of a ledger: go on with a turn from its tokens so far, or keep it for who asks."""
        self.turns[turn.ask.id] = turn
        if not turn.over:
            turn.state, turn.engine, turn.since = State.QUEUED, None, now
            turn.arrived = now  # it was another clock's
            turn.attempt += 1
            self._queue(turn)

    def arrived(self, turn: Turn, attempt: int, chunk: Chunk, now: float) -> None:
        if attempt != turn.attempt or turn.engine not in self.engines:
            return  # of an attempt that was given up
        engine = self.engines[turn.engine]
        if chunk.cached is not None:  # said after the last token
            self.hits += chunk.cached - turn.cached
            self.prefixes.correct(engine.id, turn.cached, chunk.cached)
        if turn.over:
            return
        if chunk.tokens:
            engine.hear(turn, len(chunk.tokens), now)
        turn.take(chunk, engine.version, now)
        if chunk.finish is None and turn.left > 0:
            return
        if chunk.finish in CUT_REASONS and turn.left > 0:
            self.cut(turn, attempt, Cut.REVOKED, now)
            return
        turn.finish = "length" if chunk.finish in (None, *CUT_REASONS) else chunk.finish
        turn.stop = chunk.stop
        self._end(turn, State.DONE, now)

    def cut(self, turn: Turn, attempt: int, why: Cut, now: float) -> None:
        """It did not end where it is: back to the queue with what it has."""
        if turn.over or attempt != turn.attempt or turn.engine is None:
            return
        engine = self.engines.get(turn.engine)
        if engine is not None:
            engine.end(turn)
            engine.fail(why, now)
        self.cuts[why] += 1
        turn.cuts.append(why)
        self.jobs[turn.ask.job].running -= 1
        turn.state, turn.engine, turn.since = State.QUEUED, None, now
        turn.attempt += 1
        self._queue(turn)

    def refuse(self, turn: Turn, attempt: int, status: int, why: str, now: float) -> None:
        """An engine says that what is asked is wrong: no other would say otherwise."""
        if not turn.over and attempt == turn.attempt:
            turn.status, turn.error = status, why
            self._end(turn, State.ABORTED, now)

    def cancel(self, turn: Turn, now: float) -> None:
        if not turn.over:
            if turn.engine is not None:
                self._stops.append(Stop(turn, self.engines[turn.engine], turn.attempt))
            turn.finish = "abort"
            self._end(turn, State.ABORTED, now)

    def forget(self, turn: Turn) -> None:
        """Its result is where it belongs."""
        if turn.over:
            self.turns.pop(turn.ask.id, None)

    # ---- engines

    def join(self, engine: Engine, now: float) -> None:
        engine.joined = now
        engine.due = {job.name: job.version or 0 for job in self.jobs.values()}
        self.engines[engine.id] = engine

    def leave(self, id_: str, now: float) -> None:
        """It is gone: what it had goes on elsewhere."""
        if (engine := self.engines.get(id_)) is not None:
            self.clear(engine, Cut.GONE, now)
            del self.engines[id_]
            self.prefixes.forget(id_)

    def clear(self, engine: Engine, why: Cut, now: float) -> None:
        """Take all turns away from an engine."""
        for turn in list(engine.turns.values()):
            self._stops.append(Stop(turn, engine, turn.attempt))
            self.cut(turn, turn.attempt, why, now)

    # ---- deciding

    def decide(self, now: float) -> list[Start | Stop]:
        self._end_stalls(now)
        for job in self.jobs.values():
            while job.held and job.may_begin:
                self._begin(job, job.held.popleft())
        done: list[Start | Stop] = [*self._stops]
        self._stops.clear()
        for _ in range(MOST_STARTS):
            if (start := self._next(now)) is None:
                self.unfinished = False
                return done
            done.append(start)
        self.unfinished = True
        return done

    def _end_stalls(self, now: float) -> None:
        if now < self._stalls_at:
            return
        self._stalls_at = now + LOOK_FOR_STALLS_S
        for engine in self.engines.values():
            if engine.stalls(now, self.rules.stall_s) and self._others(engine, now):
                self.clear(engine, Cut.STALLED, now)

    def _others(self, engine: Engine, now: float) -> bool:
        """Whether anybody else could go on with what an engine has."""
        return any(
            other is not engine and other.standing(now) == Standing.READY
            for other in self.engines.values()
        )

    def _next(self, now: float) -> Start | None:
        """The next turn that can be placed, of the job that has least of its share."""
        waiting = [job for job in self.jobs.values() if job.queue]
        for job in sorted(waiting, key=lambda job: (job.running / job.share, job.name)):
            if job.running < job.most_running and (start := self._first(job, now)) is not None:
                return start
        return None

    def _first(self, job: Job, now: float) -> Start | None:
        usable = self._usable(job)
        free = [engine for engine in usable if engine.takes_more(now)]
        if not free:
            return None
        missed: list[tuple[float, int, str]] = []
        places = sum(engine.free_places for engine in free)
        crowd = Crowd(job.waiting > places, Counter())
        found = None
        while job.queue and len(missed) < LOOK_FURTHER and found is None:
            entry = heapq.heappop(job.queue)
            if not self._waits(entry[2]):
                continue
            found = self._place(self.turns[entry[2]], job, usable, free, crowd, now)
            if found is None:
                missed.append(entry)
        for entry in missed:
            heapq.heappush(job.queue, entry)
        return found

    def _usable(self, job: Job) -> list[Engine]:
        usable = [engine for engine in self.engines.values() if job.may_use(engine)]
        borrowed = [engine for engine in usable if engine.borrowed]
        if len(borrowed) <= job.max_borrowed:
            return usable
        used = [engine for engine in borrowed if engine.has(job.name)]
        if len(used) < job.max_borrowed:
            return usable
        return [engine for engine in usable if not engine.borrowed or engine in used]

    def _place(
        self,
        turn: Turn,
        job: Job,
        usable: list[Engine],
        free: list[Engine],
        crowd: Crowd,
        now: float,
    ) -> Start | None:
        ask = turn.ask
        tokens = ask.prompt + turn.tokens
        before = self._trajectories.last(ask.trajectory).engine or None
        full = [engine for engine in usable if engine.id == before and engine not in free]
        candidates = free + full
        names = {
            version: prefixes.chain(tokens, _salt(job, version))
            for version in {engine.version for engine in candidates}
        }
        cached: dict[str, int] = {}
        for version, chain in names.items():
            held = self.prefixes.cached(chain)
            cached |= {
                id_: n
                for id_, n in held.items()
                if id_ in self.engines and self.engines[id_].version == version
            }
            self._trajectories.believe(ask.trajectory, version, cached)
        if before is None and cached:
            before = max(cached, key=lambda id_: (cached[id_], id_))
        expected = max(1, round(min(turn.left, self.expect(turn))))
        asked = Placing(
            len(tokens), expected, cached, before, self.further(ask), self._placed,
            crowd.more_than_places, crowd.ahead[before],
        )  # fmt: skip
        chosen = placement.place(self.rules.placement, asked, [e.facts(now) for e in candidates])
        if chosen is None:
            crowd.ahead[before] += 1
            return None
        engine = self.engines[chosen.id]
        had = cached.get(engine.id, 0)
        self.prefixes.hold(engine.id, names[engine.version], engine.capacity)
        turn.cached = had
        self.hits += had
        self.looked += len(tokens)
        self._placed += 1
        self.reasons[placement.reason(asked, engine.id)] += 1
        engine.begin(turn, len(tokens) - had, len(tokens) + expected, now)
        job.running += 1
        job.waiting -= 1
        turn.state, turn.engine, turn.since, turn.sent = (
            State.PLACED,
            engine.id,
            now,
            len(turn.tokens),
        )
        self._trajectories.placed(
            ask.trajectory, engine.id, engine.version, len(tokens), last=ask.last
        )
        return Start(turn, engine, _salt(job, engine.version))

    # ---- bookkeeping

    def _queue(self, turn: Turn) -> None:
        job = self.jobs[turn.ask.job]
        job.waiting += 1
        if turn.attempt or turn.ask.trajectory in self._trajectories:
            self._push(job, turn)
        elif job.may_begin:
            self._begin(job, turn.ask.id)
        else:
            job.held.append(turn.ask.id)

    def _begin(self, job: Job, id_: str) -> None:
        """A trajectory's first turn, unless nobody waits for it any more."""
        if self._waits(id_):
            job.begun += 1
            self._push(job, self.turns[id_])

    def _push(self, job: Job, turn: Turn) -> None:
        turns = self._trajectories.last(turn.ask.trajectory).turns
        waiting = Waiting(turn.arrived, self.expect(turn), turns)
        rank = order.rank(self.rules.order, waiting)
        heapq.heappush(job.queue, (rank, next(self._numbers), turn.ask.id))

    def expect(self, turn: Turn) -> float:
        """Tokens that a turn will likely still make."""
        ask = turn.ask
        expected = self.jobs[ask.job].lengths.expect(f"t:{ask.trajectory}", f"g:{ask.group}", "all")
        return min(max(expected - len(turn.tokens), 16.0), float(turn.left))

    def further(self, ask: Ask) -> int:
        """Turns that will likely follow this one: as many as there were."""
        return 0 if ask.last else self._trajectories.last(ask.trajectory).turns

    def to_come(self, ask: Ask) -> int:
        """Like `further`, and of one that has just begun what the job's others were like."""
        if ask.last:
            return 0
        job, turns = self.jobs[ask.job], self._trajectories.last(ask.trajectory).turns
        return provisioner.to_come(turns, job.turns / max(1, job.begun))

    def _end(self, turn: Turn, state: State, now: float) -> None:
        job = self.jobs[turn.ask.job]
        if turn.state == State.QUEUED:
            job.waiting -= 1
            self._tidy(job)
        if turn.engine is not None:
            job.running -= 1
            if (engine := self.engines.get(turn.engine)) is not None:
                engine.end(turn)
        if state == State.DONE:
            self._trajectories.ended(turn.ask.trajectory, turn.length)
            trajectory, group = f"t:{turn.ask.trajectory}", f"g:{turn.ask.group}"
            job.lengths.add(len(turn.tokens), trajectory, group, "all")
            job.turns += 1
        self.ended[state] += 1
        turn.state, turn.since = state, now

    def _tidy(self, job: Job) -> None:
        if len(job.queue) + len(job.held) > GHOSTS * (job.waiting + 1):
            job.queue = [entry for entry in job.queue if self._waits(entry[2])]
            job.held = deque(id_ for id_ in job.held if self._waits(id_))
            heapq.heapify(job.queue)

    def _waits(self, id_: str) -> bool:
        turn = self.turns.get(id_)
        return turn is not None and turn.state == State.QUEUED


def _salt(job: Job, version: str) -> str:
    """Other weights, other prefixes: nothing has to be flushed when versions change."""
    return f"{job.name}-w{version or 0}"
