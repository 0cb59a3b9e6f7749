"""Devices whose nodes report here: which are held, which of their engines get turns.

Without I/O, as the core: told what nodes say, answers what they should do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rose.scheduler import lease, provisioner
from rose.scheduler.core import Scheduler
from rose.scheduler.facts import PLACES
from rose.scheduler.fleet import Engine
from rose.scheduler.lease import Lease, Order, Phase, Word
from rose.scheduler.provisioner import MOST_TURNS, Demand, Device
from rose.scheduler.turn import State


@dataclass
class Node:
    id: str
    engine: str
    dedicated: bool
    word: Word
    lease: Lease = field(default_factory=Lease)


class Nodes:
    def __init__(
        self, core: Scheduler, most_borrowed: int, keep_s: float = provisioner.KEEP_S
    ) -> None:
        self._core = core
        self._most = most_borrowed
        self._keep_s = keep_s
        self._low_since: float | None = None
        self._changed = -1e9
        self._wanted: set[str] = set()
        self.known: dict[str, Node] = {}

    @property
    def wanted(self) -> frozenset[str]:
        """Devices to hold, of those that are not dedicated."""
        return frozenset(self._wanted)

    def heard(
        self, id_: str, engine: str, *, dedicated: bool, word: Word, places: int = PLACES
    ) -> tuple[Node, Order | None]:
        """What a node says of itself; returns what to answer."""
        node = self.known.get(id_)
        if node is None or node.engine != engine:
            self.forget(id_, word.at)
            node = self.known[id_] = Node(id_, engine, dedicated, word)
            self._core.join(Engine(id_, engine, not dedicated, True, active=False), word.at)
        node.word = word
        self.decide(word.at)
        wanted = dedicated or id_ in self._wanted
        node.lease, order = lease.step(node.lease, word, wanted=wanted, now=word.at)
        ours = self._core.engines[id_]
        ours.active = node.lease.phase in (Phase.ACTIVE, Phase.DRAINING) and word.active
        ours.draining = node.lease.phase == Phase.DRAINING
        ours.memory, ours.places = word.memory, places
        return node, order

    def decide(self, now: float) -> None:
        """Forget who is lost, and how many to hold."""
        for id_ in [n.id for n in self.known.values() if lease.lost(n.word, now)]:
            self.forget(id_, now)
        left = [turn for turn in self._core.turns.values() if not turn.over]
        stall_s = self._core.rules.stall_s
        stuck = {e.id for e in self._core.engines.values() if e.stalls(now, stall_s)}
        jobs = {turn.ask.job for turn in left}
        demand = Demand(
            tokens=sum(
                self._core.expect(turn) * (1 + min(self._core.to_come(turn.ask), MOST_TURNS))
                for turn in left
            ),
            waiting=sum(turn.state == State.QUEUED or turn.engine in stuck for turn in left),
            most=min(self._most, sum(self._core.jobs[job].max_borrowed for job in jobs)),
            changed=self._changed,
        )
        devices = [self._device(node, stuck) for node in self.known.values()]
        if not provisioner.is_low(demand, devices):
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        demand = replace(demand, low_since=self._low_since)
        wanted = provisioner.borrow(demand, devices, now, self._keep_s)
        if wanted != self._wanted:
            self._changed = now
            self._wanted = wanted

    def forget(self, id_: str, now: float) -> None:
        if self.known.pop(id_, None) is not None:
            self._wanted.discard(id_)
            self._core.leave(id_, now)

    def _device(self, node: Node, stuck: set[str]) -> Device:
        makes = 0.0 if node.id in stuck else self._core.engines[node.id].tokens_per_s
        held = node.dedicated or node.id in self._wanted
        if not held:
            makes *= 1.0 - node.word.load  # what was measured was when it was held
        return Device(node.id, makes, held, node.dedicated, node.word.offered)
