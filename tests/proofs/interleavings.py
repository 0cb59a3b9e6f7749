"""The KV hand-over on a tiny device, effect by effect: the engines' own code, and everything else.

Both engines run as in `handover`. What one does between two looks at the page is a row of effects;
between any two of them the other one may do anything, either may die and come back, and a reading
may fail. The rollout engine publishes from two threads, so its half may for a moment show the old
claim with the new revision or the other way round. Only the order of revisions matters, so they are
renumbered and the states are finitely many: no history is too long to be among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from tests.proofs import handover
from tests.proofs.handover import Acked, Claim, Effect, Moved, Rollout, Serving, Told

TOTAL = 2


class Shown(NamedTuple):
    """The rollout engine's half of the page."""

    claim: int
    revision: int


class World(NamedTuple):
    rollout: Rollout | None = None
    rollout_does: tuple[Effect | Shown, ...] = ()
    serving: Serving | None = None
    serving_does: tuple[Effect, ...] = ()
    shown: Shown = Shown(0, 0)
    told: Told = Told(0, 0)
    """Serving's half of the page."""

    @property
    def held(self) -> int:
        return sum((self.rollout[0] if self.rollout else 0, self.serving[0] if self.serving else 0))


class Device:
    def __init__(self, headroom: float) -> None:
        self.headroom = headroom
        self._follow = cache(handover.follow)
        self._respect = cache(handover.respect)

    def after(self, world: World) -> Iterator[World]:
        """All that can happen next."""
        if (rollout := world.rollout) is None:
            yield born(world)
        else:
            yield killed(world)
            if world.rollout_does:
                yield rollout_goes_on(world)
            else:
                for wanted in range(TOTAL + 1):
                    yield self.rollout_looks(world, wanted)
                    if wanted < rollout.usable:
                        yield self.rollout_looks(world, wanted, used=rollout.usable)
                        yield self.rollout_looks(world, wanted, used=rollout.usable, may_end=True)
        if (serving := world.serving) is None:
            yield from (self.boot(world, read) for read in (Claim(*world.shown), None))
        else:
            yield world._replace(serving=None, serving_does=())
            if world.serving_does:
                yield serving_goes_on(world)
            else:
                yield published(world)
                for read in (Claim(*world.shown), None):
                    for used in {0, serving.quota}:
                        yield self.serving_looks(world, read, used)

    def rollout_looks(
        self, world: World, wanted: int, used: int = 0, may_end: bool = False
    ) -> World:
        engine, told = world.rollout, world.told if world.serving else None
        assert engine is not None
        sizes = {"total": TOTAL, "blocks": TOTAL, "used": used}
        does: list[Effect | Shown] = []
        for effect in self._follow(engine, wanted, told, may_end=may_end, **sizes):
            if isinstance(effect, Moved):
                does.append(effect)
                continue
            old, (claim, revision, _) = engine, effect
            does += [Shown(claim, old.revision), Shown(old.claim, revision), Shown(claim, revision)]
            engine = engine._replace(claim=claim, revision=revision)
        return world._replace(rollout=engine, rollout_does=tuple(does))

    def boot(self, world: World, read: Claim | None) -> World:
        """Serving holds nothing before it has respected what the page says."""
        effects, _ = self._looked(world, Serving(TOTAL, handing_over=True), read)
        knows = read is not None and world.rollout is not None
        return world._replace(serving=Serving(0, knows=knows), serving_does=tuple(effects))

    def serving_looks(self, world: World, read: Claim | None, used: int = 0) -> World:
        engine = world.serving
        assert engine is not None
        effects, more = self._looked(world, engine, read, used=used, slice_=1)
        knows = engine.knows or (read is not None and world.rollout is not None)
        looked = engine._replace(knows=knows, handing_over=more)
        return world._replace(serving=looked, serving_does=tuple(effects))

    def _looked(
        self, world: World, engine: Serving, read: Claim | None, **more: int
    ) -> tuple[list[Effect], bool]:
        sizes: dict[str, Any] = {"total": TOTAL, "blocks": TOTAL, "headroom": self.headroom}
        lives = world.rollout is not None
        return self._respect(engine, read, rollout_lives=lives, **sizes, **more)

    def worlds(self) -> Iterator[World]:
        """Every state that can come about."""
        seen = {World()}
        queue = deque(seen)
        while queue:
            world = queue.popleft()
            yield world
            for after in map(renumbered, self.after(world)):
                if after not in seen:
                    seen.add(after)
                    queue.append(after)

    def calm(self, world: World, wanted: int | None) -> World:
        """The end when nothing dies, fails or is in use any more; None: without rollouts."""
        if wanted is None:
            world = killed(world)
        elif world.rollout is None:
            world = born(world)
        world = self.boot(world, None) if world.serving is None else world
        for _ in range(4 * TOTAL):
            before, world = world, published(settled(world))
            world = settled(self.serving_looks(world, Claim(*world.shown)))
            if wanted is not None:
                world = settled(self.rollout_looks(published(world), wanted))
            if world == before:
                break
        return world


def born(world: World) -> World:
    """A new rollout engine, above all revisions there ever were."""
    engine = Rollout(0, 0, max(_revisions(world)) + 1)
    return world._replace(rollout=engine, shown=Shown(0, engine.revision))


def killed(world: World) -> World:
    serving = world.serving and world.serving._replace(knows=False)
    return world._replace(rollout=None, rollout_does=(), serving=serving)


def published(world: World) -> World:
    assert world.serving is not None
    return world._replace(told=Told(world.serving.quota, world.serving.revision))


def settled(world: World) -> World:
    """When both have done what they are about to do."""
    while world.rollout_does:
        world = rollout_goes_on(world)
    while world.serving_does:
        world = serving_goes_on(world)
    return world


def rollout_goes_on(world: World) -> World:
    effect, *others = world.rollout_does
    world = world._replace(rollout_does=tuple(others))
    if isinstance(effect, Shown):
        return world._replace(shown=effect)
    assert world.rollout is not None and isinstance(effect, Moved)
    return world._replace(rollout=world.rollout._replace(usable=effect.after))


def serving_goes_on(world: World) -> World:
    effect, *others = world.serving_does
    assert world.serving is not None
    if isinstance(effect, Acked):
        serving = world.serving._replace(claim=effect.claim, revision=effect.revision)
    else:
        assert isinstance(effect, Moved)
        serving = world.serving._replace(quota=effect.after)
    return world._replace(serving=serving, serving_does=tuple(others))


def _revisions(world: World) -> set[int]:
    """All that are known somewhere; 0 is nobody's."""
    named = [world.rollout, world.serving, world.shown, *world.rollout_does, *world.serving_does]
    found = {one.revision for one in named if one is not None and not isinstance(one, Moved)}
    return found | {world.told.acked, 0}


def renumbered(world: World) -> World:
    """The same with the smallest revisions."""
    number = {revision: n for n, revision in enumerate(sorted(_revisions(world)))}

    def smaller(one: Any) -> Any:
        if one is None or isinstance(one, Moved):
            return one
        return one._replace(revision=number[one.revision])

    return World(
        smaller(world.rollout),
        tuple(map(smaller, world.rollout_does)),
        smaller(world.serving),
        tuple(map(smaller, world.serving_does)),
        smaller(world.shown),
        world.told._replace(acked=number[world.told.acked]),
    )
