"""A whole cluster in one thread: clock, network and randomness come from a seed.

The scheduler's core, its leases and its records are the real ones; engines, their nodes, network,
clients and the ledger's disk are simulated. Engines say what an emulated one does, token for token,
so every answer can be checked. Messages are lost, late, or come twice; a scheduler that dies finds
what its ledger had, which is a moment old. What else goes wrong, and when, is in `trouble`.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rose.bench.emulated import answer_to
from rose.scheduler.core import Full, Rules, Scheduler, Start, Stop
from rose.scheduler.fleet import Engine
from rose.scheduler.job import Job
from rose.scheduler.lease import Order, Word
from rose.scheduler.ledger import Record, record, turn_of
from rose.scheduler.nodes import Nodes
from rose.scheduler.turn import Ask, Chunk, Cut, Span, State, Turn

CALM_AFTER_S = 60.0
"""No faults from here on: everything must end."""
PATIENCE_S = 2_000.0
LOST, TWICE = 0.05, 0.05
"""Of messages, each on its own."""
CONNECT_S = 5.0
"""After which who cannot be reached is given up."""


@dataclass
class SimEngine:
    id: str
    lent: bool = False
    """Its node reports, and the scheduler says whether it is to be active."""
    active: bool = True
    alive: bool = True
    revoked: bool = False
    stuck: bool = False
    version: int = 0
    token_s: float = 0.05
    reached: float = 0.0
    """From when on it can be reached."""
    going: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Attempts that it works on."""


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        fixed, lent = self.random.randint(0, 2), self.random.randint(1, 3)
        self.engines = {
            f"e{i}": SimEngine(
                f"e{i}", i >= fixed, i < fixed, token_s=self.random.uniform(0.02, 0.2)
            )
            for i in range(fixed + lent)
        }
        self.up = True
        """The scheduler's process."""
        self.life = 0
        """How often it was started: what belongs to an earlier life is void."""
        self.disk: dict[str, tuple[Ask, Record]] = {}
        self.writing: dict[str, tuple[Ask, Record]] = {}
        """What the ledger was told, written or not."""
        self.core = self.start()
        self.asks: dict[str, Ask] = {}
        self.results: Counter[str] = Counter()
        """What clients got."""
        self.listening: set[str] = set()
        self.ends: Counter[tuple[int, str]] = Counter()
        """Of turns, in each life of the scheduler."""
        self.wrong: list[str] = []
        self.left: set[str] = set()
        self.cuts: Counter[str] = Counter()
        self.leaking: dict[tuple[str, int], float] = {}
        self.stopped: set[tuple[str, int]] = set()
        self.arrives: dict[object, float] = {}
        """When the last word of a stream comes."""

    # ---- time

    def at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), act))

    def run(self) -> None:
        self.tick()
        while self.events and self.now < PATIENCE_S:
            self.now, _, act = heapq.heappop(self.events)
            act()
            if self.finished():
                return

    def finished(self) -> bool:
        answered = all(self.results[id_] or id_ in self.left for id_ in self.asks)
        return self.now > CALM_AFTER_S and self.up and answered and not self.core.turns

    # ---- the scheduler

    def start(self) -> Scheduler:
        rules = Rules(
            placement=self.random.choice(["cost", "cost", "paper", "least_loaded", "sticky"]),
            order=self.random.choice(["longest_first", "c_mlfq", "fifo"]),
        )
        core = Scheduler(rules)
        core.jobs = {"a": Job("a"), "b": Job("b", share=2.0)}
        for engine in self.engines.values():
            if not engine.lent:
                core.join(
                    Engine(engine.id, "", capacity=4000, version=str(engine.version)), self.now
                )
        self.nodes = Nodes(core, most_borrowed=len(self.engines))
        return core

    def keep(self, turn: Turn) -> None:
        """Into the ledger, in a moment; a dead scheduler writes nothing."""
        kept, life = (turn.ask, copy.deepcopy(record(turn))), self.life
        self.writing[turn.ask.id] = kept

        def write() -> None:
            if self.life == life:
                self.disk[turn.ask.id] = kept

        self.at(0.02, write)

    def kick(self) -> None:
        if not self.up:
            return
        for action in self.core.decide(self.now):
            match action:
                case Start():
                    self.send(action)
                case Stop():
                    engine = self.engines[action.engine.id]
                    key = (action.turn.ask.id, action.attempt)
                    self.stopped.add(key)
                    wait = max(0.0, engine.reached - self.now)
                    self.at(wait + self.delay(), lambda e=engine, k=key: e.going.pop(k, None))
        if self.core.unfinished:
            self.at(0.0, self.kick)

    def die(self) -> None:
        if not self.up:
            return
        self.up = False
        self.life += 1
        self.listening.clear()
        self.stopped.clear()
        self.writing.clear()
        for engine in self.engines.values():
            engine.going.clear()  # its connections are closed
        self.at(self.random.uniform(0.1, 3.0), self.come_back)

    def come_back(self) -> None:
        self.up = True
        self.core = self.start()
        for ask, kept in self.disk.values():
            turn = turn_of(ask, copy.deepcopy(kept))
            if not turn.over:
                self.core.restore(turn, self.now)
        for id_, ask in self.asks.items():
            if not self.results[id_] and id_ not in self.left:
                self.at(self.random.uniform(0.0, 1.0), lambda a=ask: self.ask(a))
        self.kick()

    # ---- clients

    def ask(self, ask: Ask) -> None:
        """Ask, or ask again with the same id, also because the question was lost."""
        self.asks[ask.id] = ask
        if self.is_lost():
            self.at(1.0, lambda: self.ask(ask))
            return
        if not self.up or self.results[ask.id] or ask.id in self.left:
            return
        self.listening.add(ask.id)
        kept = self.writing.get(ask.id) or self.disk.get(ask.id)
        if kept is not None and ask.id not in self.core.turns:
            turn = turn_of(kept[0], copy.deepcopy(kept[1]))
            if turn.over:
                self.deliver(turn)
                return
        try:
            turn = self.core.submit(ask, self.now)
        except Full:
            self.at(1.0, lambda: self.ask(ask))
            return
        self.keep(turn)
        self.kick()

    def deliver(self, turn: Turn) -> None:
        """A turn that goes on after a restart may have nobody who listens any more."""
        if turn.ask.id in self.listening:
            self.listening.discard(turn.ask.id)
            self.results[turn.ask.id] += 1
        expected = answer_to(turn.ask.prompt, turn.ask.max_tokens, ignore_eos=False)
        if (turn.tokens, turn.finish) != expected:
            self.wrong.append(f"{turn.ask.id}: {turn.tokens} {turn.finish} not {expected}")
        if len(turn.logprobs) != len(turn.tokens):
            self.wrong.append(f"{turn.ask.id}: {len(turn.logprobs)} log-probs")
        starts = [span.start for span in turn.spans]
        if turn.tokens and (starts != sorted(set(starts)) or starts[0]):
            self.wrong.append(f"{turn.ask.id}: spans {turn.spans}")

    def leave(self, id_: str) -> None:
        if self.results[id_] or not self.up:
            return
        self.left.add(id_)
        if (turn := self.core.turns.get(id_)) is not None:
            self.core.cancel(turn, self.now)
            self.keep(turn)
            self.core.forget(turn)
            self.kick()

    # ---- engines and network

    def delay(self) -> float:
        return self.random.expovariate(1 / 0.005)

    def send(self, start: Start) -> None:
        engine, turn = self.engines[start.engine.id], start.turn
        key = (turn.ask.id, turn.attempt)
        tokens, finish = answer_to(turn.ask.prompt + turn.tokens, turn.left, ignore_eos=False)
        life = self.life

        def begin() -> None:
            if key in self.stopped:  # a connection that is closed before anything was asked
                return
            if self.now < engine.reached:
                self.at(CONNECT_S, lambda: self.cut(turn, key, life))
            elif not engine.alive:
                self.hear(engine, turn, key, life, None, Cut.LOST)
            elif engine.revoked or not engine.active:
                self.hear(engine, turn, key, life, Chunk([], finish="abort", stop="rose:dormant"))
            else:
                engine.going[key] = tokens
                self.at(engine.token_s, lambda: self.step(engine, turn, key, life, 0, finish))

        self.at(self.delay(), begin)

    def step(
        self, engine: SimEngine, turn: Turn, key: tuple[str, int], life: int, at: int, finish: str
    ) -> None:
        """The engine makes a token of an attempt, or fails to."""
        if key not in engine.going:
            return
        if not engine.alive:
            engine.going.pop(key)
            self.hear(engine, turn, key, life, None, Cut.LOST)
            return
        if engine.stuck:
            self.at(0.1, lambda: self.step(engine, turn, key, life, at, finish))
            return
        if engine.revoked:
            engine.going.pop(key)
            self.hear(engine, turn, key, life, Chunk([], finish="abort", stop="rose:revoked"))
            return
        tokens = engine.going[key]
        last = at == len(tokens) - 1
        if self.now < CALM_AFTER_S and self.random.random() < 0.002:
            engine.going.pop(key)  # the connection breaks, perhaps after the engine said all
            self.hear(engine, turn, key, life, None, Cut.LOST)
            return
        spans = [Span(0, str(engine.version))] if last else None
        chunk = Chunk([tokens[at]], [-0.1], finish if last else None, spans=spans)
        self.hear(engine, turn, key, life, chunk)
        if last:
            engine.going.pop(key)
        else:
            self.at(engine.token_s, lambda: self.step(engine, turn, key, life, at + 1, finish))

    def hear(
        self,
        engine: SimEngine,
        turn: Turn,
        key: tuple[str, int],
        life: int,
        chunk: Chunk | None,
        why: Cut = Cut.LOST,
    ) -> None:
        """A stream is in order: what is sent later arrives later, also from who cannot be reached
        now."""
        stream = (key, life)
        sent = max(self.now, engine.reached)
        due = max(sent + self.delay(), self.arrives.get(stream, 0.0) + 1e-6)
        self.arrives[stream] = due

        def arrive() -> None:
            if self.life != life or not self.up:
                return
            if chunk is None:
                self.core.cut(turn, key[1], why, self.now)
            else:
                self.core.arrived(turn, key[1], chunk, self.now)
            if turn.state == State.DONE and turn.ask.id in self.core.turns:
                self.keep(turn)
                self.core.forget(turn)
                self.ends[self.life, turn.ask.id] += 1
                self.deliver(turn)
            elif self.random.random() < 0.1:
                self.keep(turn)
            self.kick()

        self.at(due - self.now, arrive)

    def cut(self, turn: Turn, key: tuple[str, int], life: int) -> None:
        if self.life == life and self.up:
            self.core.cut(turn, key[1], Cut.LOST, self.now)
            self.kick()

    # ---- nodes

    def is_lost(self) -> bool:
        return self.now < CALM_AFTER_S and self.random.random() < LOST

    def transmit(self, engine: SimEngine, act: Callable[[], None]) -> None:
        """A message from or to a node: lost, late, or more than once."""
        if self.is_lost() or self.now < engine.reached:
            return
        again = self.now < CALM_AFTER_S and self.random.random() < TWICE
        for _ in range(1 + again):
            slow = self.random.uniform(0.0, 3.0) if self.random.random() < TWICE else 0.0
            self.at(self.delay() + slow, act)

    def report(self, engine: SimEngine) -> None:
        """A node's word, about once a second."""
        self.at(self.random.uniform(0.8, 1.2), lambda: self.report(engine))
        if not engine.alive:
            return
        active, offered = engine.active and not engine.revoked, not engine.revoked

        def arrive() -> None:
            if self.up:
                word = Word(self.now, active, offered, self.random.random(), 1.0)
                _, order = self.nodes.heard(engine.id, "", dedicated=False, word=word)
                self.core.engines[engine.id].version = str(engine.version)
                if order is not None:
                    self.transmit(engine, lambda: self.obey(engine, order))
                self.kick()

        self.transmit(engine, arrive)

    def obey(self, engine: SimEngine, order: Order) -> None:
        if not engine.alive:
            return
        if order == Order.ACTIVATE:
            self.at(0.5, lambda: setattr(engine, "active", engine.alive))
        else:
            engine.active = False  # what it has it ends

    # ---- looking

    def tick(self) -> None:
        if self.up:
            self.nodes.decide(self.now)
        self.kick()
        self.find_leaks()
        if self.now < PATIENCE_S:
            self.at(0.25, self.tick)

    def find_leaks(self) -> None:
        """Engines must not work for long on what nobody waits for."""
        going = {
            key
            for engine in self.engines.values()
            if self.now >= engine.reached
            for key in engine.going
        }
        current = {(id_, turn.attempt) for id_, turn in self.core.turns.items() if turn.engine}
        self.leaking = {key: self.leaking.get(key, self.now) for key in going - current}
        for key, since in self.leaking.items():
            if self.now - since > 2.0:
                self.wrong.append(f"{key} is worked on, and nobody wants it")
