"""A scheduler, a node and a rollout engine: everything that can be said and happen between them.

The real `lease.step`, `reporting._once` (what a node says and does), `lifecycle.follow` and
`memory.decide`. Between scheduler and node any word and any order may arrive at any time, also one
that nobody has sent: so messages are lost, late, doubled and out of order, and both sides crash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterator
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

from rose.cluster import reporting
from rose.executor import lifecycle, memory
from rose.executor.facts import LeaseState
from rose.scheduler import lease
from rose.scheduler.lease import AGAIN_S, Lease, Order, Phase, Word

DORMANT, ACTIVATING, ACTIVE, DRAINING = LeaseState
ROUND_S = 10.0
"""Between two words when all is calm; so an order is given again after a few."""


class World(NamedTuple):
    phase: Phase = Phase.DORMANT
    wanted: bool = False
    """By the scheduler's provisioner."""
    offered: bool = True
    ordered: LeaseState = DORMANT
    """By the node, on the page."""
    state: LeaseState = DORMANT
    """Of the rollout engine."""
    memory: bool = False
    turns: bool = False
    """Some are running, and hold the memory until they end."""
    taken_back: bool = False
    """The node's owner has revoked the lease and not lent the device again,"""
    obeyed: bool = False
    """and the engine has looked at its orders since."""


class Answer:
    """What a scheduler answers to a node, as an HTTP client sees it."""

    status = 200

    def __init__(self, order: Order | None) -> None:
        self._order = order
        self.said: dict[str, Any] = {}

    def post(self, _: str, *, json: dict[str, Any], **__: Any) -> Answer:
        self.said = json
        return self

    async def json(self) -> dict[str, Any]:
        return {"order": self._order}

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def node(world: World, order: Order | None) -> tuple[Word, LeaseState]:
    """What a node says, and what it orders once it has its answer."""
    answer, ordered = Answer(order), [world.ordered]

    async def activate() -> None:
        ordered.append(ACTIVE)

    async def drain() -> None:
        ordered.append(DRAINING)

    agent: Any = SimpleNamespace(
        url="node",
        ready=True,
        offered=world.offered,
        rollout=SimpleNamespace(url="engine"),
        config=SimpleNamespace(serving=True, rollout=SimpleNamespace(max_seqs=8)),
        page=SimpleNamespace(rollout=lambda: None),
        status=lambda: {"state": world.state.name.lower()},
        session=answer,
        activate=activate,
        drain=drain,
    )
    _finished(reporting._once(agent, "scheduler", "", 0.0))
    return Word(0.0, answer.said["active"], answer.said["offered"]), ordered[-1]


def _finished(work: Coroutine[Any, Any, Any]) -> None:
    """Run what never has to wait."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def looks(world: World, *, memory_free: bool) -> World:
    """The rollout engine carries out orders and follows the memory policy, as `_look_around`."""
    world = _follows(world)
    budget = memory.Budget(int(world.memory))
    demand = memory.Demand(lifecycle.holds_memory(world.state), 0, serving_alive=True)
    wants = memory.decide(budget, demand, memory.MemoryTerms(2, rollout_max=1), 0.0).bytes > 0
    if world.memory and not wants and not world.turns:
        world = world._replace(memory=False)
    elif wants and not world.memory and memory_free:
        world = _follows(world._replace(memory=True))
    return world._replace(obeyed=world.taken_back)


def _follows(world: World) -> World:
    conditions = {"has_memory": world.memory, "empty": not world.turns}
    return world._replace(state=lifecycle.follow(world.state, world.ordered, **conditions))


def ends_step(world: World) -> World:
    """What is left to the engine's own thread, as `_do_chores`."""
    if lifecycle.takes_turns(world.state) or world.state == DRAINING:
        return world
    return world._replace(turns=False, memory=world.memory and lifecycle.holds_memory(world.state))


class Lending:
    def __init__(self) -> None:
        self._step, self._node = cache(lease.step), cache(node)

    def after(self, world: World) -> Iterator[World]:
        """All that can happen next."""
        yield world._replace(wanted=not world.wanted)
        yield world._replace(phase=Phase.DORMANT)  # restarted, or the node was lost
        for active, offered, now in product((False, True), (False, True), (0.0, AGAIN_S)):
            yield self.hears(world, Word(now, active, offered), Lease(world.phase), now)[0]
        for order in Order:
            yield world._replace(ordered=self.node(world, order)[1])
        yield world._replace(offered=False, ordered=DORMANT, taken_back=True, obeyed=False)
        yield world._replace(offered=True, ordered=ACTIVE, taken_back=False, obeyed=False)
        yield self.restarted(world)
        yield world._replace(state=DORMANT, ordered=DORMANT, memory=False, turns=False)  # killed
        yield looks(world, memory_free=False)
        yield looks(world, memory_free=True)
        yield looks(world._replace(ordered=DORMANT), memory_free=True)._replace(
            ordered=world.ordered
        )  # the node has been dead for a while
        if lifecycle.takes_turns(world.state) and world.memory:
            yield world._replace(turns=True)
        yield world._replace(turns=False)
        yield ends_step(world)

    def restarted(self, world: World) -> World:
        """A new node takes over what the engine is doing, and remembers what was taken back."""
        ordered = world.state if world.offered else DORMANT
        return world._replace(ordered=ordered, obeyed=world.obeyed and not world.offered)

    def hears(
        self, world: World, word: Word, held: Lease, now: float
    ) -> tuple[World, Lease, Order | None]:
        after, order = self._step(held, word, wanted=world.wanted, now=now)
        return world._replace(phase=after.phase), after, order

    def node(self, world: World, order: Order | None) -> tuple[Word, LeaseState]:
        return self._node(world, order)

    def worlds(self) -> Iterator[tuple[World, World]]:
        """Every state that can come about, with one it comes from."""
        seen = {World()}
        queue = deque(seen)
        while queue:
            world = queue.popleft()
            for after in self.after(world):
                yield world, after
                if after not in seen:
                    seen.add(after)
                    queue.append(after)

    def calm(self, world: World) -> World:
        """The end when every word arrives, memory is free and turns end."""
        held, now = Lease(world.phase, 0.0), 0.0
        for _ in range(12):
            now += ROUND_S
            said, _ = self.node(world, None)
            word = Word(now, said.active, said.offered)
            world, held, order = self.hears(world, word, held, now)
            world = world._replace(ordered=self.node(world, order)[1])
            world = ends_step(looks(world, memory_free=True))._replace(turns=False)
        return world
