"""A scheduler, a node and a rollout engine: everything that can be said and happen between them.

The real `lease.step`, `reporting._once` (what a node says and does), `Custody` (what it orders, and
what it takes up again after a restart), `Borrower.follow_orders` and `memory.decide`. Between
scheduler and node any word and any order may arrive at any time, also one that nobody has sent: so
messages are lost, late, doubled and out of order, and both sides crash. Orders stand on the page as
soon as they are given; that the device was taken back is recorded a moment later. The page may be
lost, or the records, but not both while the device is taken back: then nobody would know.

No word of the scheduler is needed for what is said above, so the states are those of node and
engine; calm begins in each of them with any lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from enum import Enum
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

from rose.cluster import custody, reporting
from rose.executor import borrower, lifecycle, memory
from rose.executor.facts import LeaseState, NodeOrders, RolloutFacts
from rose.scheduler import lease
from rose.scheduler.lease import Lease, Order, Phase, Word

DORMANT, ACTIVATING, ACTIVE, DRAINING = LeaseState
NOW = 1000.0
ROUND_S = 10.0
"""Between two words when all is calm; so an order is given again after a few."""
ROUNDS = 12


class World(NamedTuple):
    offered: bool = True
    ordered: LeaseState = DORMANT
    """By the node, on the page,"""
    lost: bool = False
    """unless that is lost."""
    recorded: bool = False
    """The node's records say that the device was taken back."""
    state: LeaseState = DORMANT
    """Of the rollout engine."""
    knows: LeaseState | None = DORMANT
    """The order that it has read last; None: too long ago."""
    memory: bool = False
    turns: bool = False
    """Some are running, and hold the memory until they end."""
    fresh: bool = True
    """Nothing was ordered since the engine started."""
    taken_back: bool = False
    """The owner has taken the device back and not lent it again,"""
    obeyed: bool = False
    """and the engine has looked at its orders since."""


class Look(Enum):
    """What the rollout engine sees when it looks at its orders."""

    ORDERS = 1
    NOTHING = 2
    OLD = 3


# ---- the node


def told(world: World, word: Callable[[custody.Custody], None]) -> World:
    """The node's custody has heard something."""
    mine = custody.Custody()
    mine.offered, mine.state = world.offered, world.ordered
    word(mine)
    fresh = world.fresh and not mine.epoch
    return world._replace(offered=mine.offered, ordered=mine.state, fresh=fresh, lost=False)


def tried(world: World, state: LeaseState) -> World:
    """An order that comes late, when the owner may have said something else meanwhile."""
    try:
        return told(world, lambda mine: mine.order(state))
    except custody.TakenBack:
        return world


def restarted(world: World, *, found: bool) -> World:
    """A new node takes over what the engine is doing, if it finds it again."""
    mine = custody.Custody()
    held = RolloutFacts(state=world.state) if found else None
    left = None if world.lost else orders(world, NOW)
    mine.recall(left, taken_back=world.recorded, held=held)
    return world._replace(offered=mine.offered, ordered=mine.state, lost=False)


def orders(world: World, now: float) -> NodeOrders:
    mine = custody.Custody()
    mine.offered, mine.state = world.offered, world.ordered
    return mine.orders(custody.Sharing(), now)


class Answer:
    """What a scheduler answers to a node, as an HTTP client sees it."""

    status = 200

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.said: dict[str, Any] = {}

    def post(self, _: str, *, json: dict[str, Any], **__: Any) -> Answer:
        self.said = json
        return self

    async def json(self) -> Any:
        return self._answer

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def answered(world: World, order: Any) -> tuple[Word, World]:
    """What a node says, and how it stands once it has its answer."""
    answer, after = Answer({"order": order}), [world]

    async def activate() -> None:
        after.append(told(world, lambda mine: mine.order(ACTIVE)))

    async def drain() -> None:
        after.append(told(world, lambda mine: mine.order(DRAINING)))

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
    return Word(0.0, answer.said["active"], answer.said["offered"]), after[-1]


def _finished(work: Coroutine[Any, Any, Any]) -> None:
    """Run what never has to wait."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


# ---- the rollout engine


def looks(world: World, look: Look, *, memory_free: bool) -> World:
    """The rollout engine carries out orders and follows the memory policy, as `_look_around`."""
    world = _follows(world, look)
    budget = memory.Budget(int(world.memory))
    demand = memory.Demand(lifecycle.holds_memory(world.state), 0)
    wants = memory.decide(budget, demand, memory.MemoryTerms(2, rollout_max=1), 0.0).bytes > 0
    if world.memory and not wants and not world.turns:
        world = world._replace(memory=False)
    elif wants and not world.memory and memory_free:
        world = _follows(world._replace(memory=True), look)
    seen = world.taken_back and look != Look.NOTHING
    return world._replace(obeyed=world.obeyed or seen)


def _follows(world: World, look: Look) -> World:
    written = NOW if look == Look.ORDERS else NOW - borrower.NODE_GRACE_S - 1.0
    reading = SimpleNamespace(facts=orders(world, written))
    sheet: Any = SimpleNamespace(
        node=lambda: None if look == Look.NOTHING else reading,
        ring=lambda _: None,
        mend=lambda _: False,
    )
    parking: Any = SimpleNamespace(usable=int(world.memory), set_usable=lambda _: None)
    terms = memory.MemoryTerms(2)
    mine = borrower.Borrower(
        sheet, parking, lambda: None, terms, dedicated=False, clock=lambda: NOW
    )
    mine.state, mine._ordered = world.state, world.knows or DORMANT
    mine._ordered_at = written if look == Look.OLD or world.knows is None else NOW
    mine.follow_orders(empty=not world.turns)
    abandoned = look == Look.OLD or (look == Look.NOTHING and world.knows is None)
    return world._replace(state=mine.state, knows=None if abandoned else mine._ordered)


def ends_step(world: World) -> World:
    """What is left to the engine's own thread, as `_do_chores`."""
    if lifecycle.takes_turns(world.state) or world.state == DRAINING:
        return world
    return world._replace(turns=False, memory=world.memory and lifecycle.holds_memory(world.state))


def engine_starts(world: World) -> World:
    """Another one, when the node has seen that the one before is dead."""
    world = told(world, lambda mine: mine.engine_started())
    return world._replace(state=DORMANT, knows=DORMANT, memory=False, turns=False, fresh=True)


# ---- together


class Lending:
    def __init__(self) -> None:
        self._step, self.answered = cache(lease.step), cache(answered)
        self._looks, self._round = cache(looks), cache(self._round)

    def after(self, world: World) -> Iterator[World]:
        """All that can happen next."""
        yield from (self.answered(world, order)[1] for order in Order)
        yield from (tried(world, state) for state in (ACTIVE, DRAINING, DORMANT))
        taken_back = told(world, lambda mine: mine.take_back())
        yield taken_back._replace(taken_back=True, obeyed=False)
        lent = told(world, lambda mine: mine.lend())
        yield lent._replace(taken_back=False, obeyed=False)
        yield world._replace(recorded=not world.offered)
        yield world._replace(lost=False)
        if not world.taken_back or world.recorded:
            yield world._replace(lost=True)
        if not world.taken_back or not world.lost:
            yield world._replace(recorded=False)
        yield from (restarted(world, found=found) for found in (False, True))
        yield engine_starts(world)
        seen = (Look.NOTHING,) if world.lost else Look
        for look, free in product(seen, (False, True)):
            yield self._looks(world, look, memory_free=free)
        if world.lost:
            yield self._looks(world, Look.NOTHING, memory_free=False)._replace(
                knows=None, state=DORMANT
            )
        if lifecycle.takes_turns(world.state) and world.memory:
            yield world._replace(turns=True)
        yield world._replace(turns=False)
        yield ends_step(world)

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

    def calm(self, world: World, phase: Phase, *, wanted: bool) -> tuple[World, Phase]:
        """The end when every word arrives, memory is free and turns end."""
        ages = 0
        for _ in range(ROUNDS):
            world, phase, ages = self._round(world, phase, ages, wanted)
        return world, phase

    def _round(
        self, world: World, phase: Phase, rounds: int, wanted: bool
    ) -> tuple[World, Phase, int]:
        """`rounds`: so many ago the lease has changed."""
        said, _ = self.answered(world, None)
        held = Lease(phase, -ROUND_S * (rounds + 1))
        after, order = self._step(held, said, wanted=wanted, now=0.0)
        _, world = self.answered(world, order)
        world = ends_step(self._looks(world._replace(lost=False), Look.ORDERS, memory_free=True))
        rounds = 0 if after.since == 0.0 else rounds + 1
        return world._replace(turns=False), after.phase, rounds
