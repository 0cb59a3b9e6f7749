"""The KV hand-over on a tiny device, effect by effect: the engines' own code, and everything else.

The engines run as in `handover`. What one does between two looks at the page is a row of effects;
between any two of them the other ones may do anything, each may die and come back, and a reading
may fail: the rollout engine's half of the page may be torn, serving's may be late, unreadable, or
of an engine that is dead by now, and the kernel may be unable to say which rollout engine lives.
The rollout engine publishes from two threads, so its half may for a moment show the old claim with
the new revision or the other way round.

With `two`, a second serving engine may start beside the first one: it respects the claim with a
quota of its own, and is the first one once that is gone and it has looked. Then a look and all that
comes of it are one step, or the states would be too many (`protocol` does without). A second
rollout engine may always try to start.

Only the order of revisions matters, so they are renumbered and the states are finitely many: no
history is too long to be among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from tests.proofs import handover
from tests.proofs.handover import Acked, Claim, Effect, Moved, Rollout, Serving, Told


class Known(IntEnum):
    """Whose claim serving has read last."""

    NOBODY = 0
    PRESENT = 1
    DEAD = 2


class Rival(IntEnum):
    """What the page says of a second serving engine."""

    NONE = 0
    HERE = 1
    """Or was here just now."""
    OWNER = 2
    """It is the only one now, and has not yet written serving's half."""


class Shown(NamedTuple):
    """The rollout engine's half of the page."""

    claim: int
    revision: int


class World(NamedTuple):
    rollout: Rollout | None = None
    rollout_does: tuple[Effect | Shown, ...] = ()
    serving: Serving | None = None
    serving_does: tuple[Effect, ...] = ()
    second: Serving | None = None
    second_does: tuple[Effect, ...] = ()
    shown: Shown = Shown(0, 0)
    told: Told = Told(0, 0)
    """Serving's half of the page."""
    rival: Rival = Rival.NONE
    left: int = 0
    """Memory of a rollout engine beside which another one has started."""

    @property
    def held(self) -> int:
        """By rollouts and the larger of the serving engines."""
        quotas = [one.quota for one in (self.serving, self.second) if one]
        return (self.rollout.usable if self.rollout else 0) + self.left + max(quotas, default=0)


class Calm(NamedTuple):
    """What is so from now on."""

    wanted: int | None = 0
    """By the rollout engine; None: there is none."""
    late: bool = False
    """Serving's facts are."""
    both: bool = False
    """A second serving engine stays."""


class Device:
    def __init__(self, headroom: float, total: int = 2, *, two: bool = False) -> None:
        self.headroom, self.total, self.two = headroom, total, two
        self._follow = cache(handover.follow)
        self._respect = cache(handover.respect)
        self._relied = cache(handover.relied)
        self._said = cache(handover.said)
        self._stands = cache(handover.stands)
        self._admitted = cache(handover.admitted)

    def after(self, world: World) -> Iterator[World]:
        """All that can happen next."""
        if self.two:
            for some in (self._after_of_rollout, self._after_of_serving, self._after_of_second):
                yield from map(settled, some(world))
            return
        yield from self._after_of_rollout(world)
        yield from self._after_of_serving(world)

    def _after_of_rollout(self, world: World) -> Iterator[World]:
        if self._admitted("rollout", taken=world.rollout is not None):
            yield born(world)
        if (rollout := world.rollout) is None:
            return
        yield killed(world)
        if world.rollout_does:
            yield rollout_goes_on(world)
            return
        for wanted, told in product((*range(self.total + 1), None), {self.read(world), None}):
            if wanted is None and told is not None:
                continue
            yield self.rollout_looks(world, wanted, told)
            if wanted is None or wanted < rollout.usable:
                for may_end in (False, True):
                    yield self.rollout_looks(world, wanted, told, rollout.usable, may_end)

    def _after_of_serving(self, world: World) -> Iterator[World]:
        if world.serving is None:
            yield from (self.boot(world, *how) for how in self._readings(world))
            return
        yield world._replace(serving=None, serving_does=())
        if world.serving_does:
            yield serving_goes_on(world)
            return
        yield published(world)
        for how, used in product(self._readings(world), {0, world.serving.quota}):
            yield self.serving_looks(world, *how, used)

    def _after_of_second(self, world: World) -> Iterator[World]:
        """It is the same code, so it is run in the first one's place."""
        if world.second is None:
            if world.rival == Rival.HERE:
                yield world._replace(rival=Rival.NONE)
            if world.serving is not None:
                empty = swapped(world)
                yield from (self.started(self.boot(empty, *how)) for how in self._readings(world))
            return
        yield swapped(swapped(world)._replace(serving=None, serving_does=()))
        if world.second_does:
            yield swapped(serving_goes_on(swapped(world)))
            return
        yield self.stood(world)
        for how, used in product(self._readings(world), {0, world.second.quota}):
            yield swapped(self.serving_looks(swapped(world), *how, used))

    def _readings(self, world: World) -> Iterator[tuple[Claim | None, bool]]:
        """Of the rollout engine's half, and whether the kernel can say who lives."""
        return product((Claim(*world.shown), None), (True, False))

    def read(self, world: World, *, late: bool = False) -> Told | None:
        """Serving's half as the rollout engine sees it."""
        return world.told if self._relied(late=late, rival=world.rival != Rival.NONE) else None

    def rollout_looks(
        self,
        world: World,
        wanted: int | None,
        told: Told | None,
        used: int = 0,
        may_end: bool = False,
    ) -> World:
        engine = world.rollout
        assert engine is not None
        sizes = {"total": self.total, "blocks": self.total, "used": used}
        does: list[Effect | Shown] = []
        for effect in self._follow(engine, wanted, told, may_end=may_end, **sizes):
            if isinstance(effect, Moved):
                does.append(effect)
                continue
            old, (claim, revision, _) = engine, effect
            does += [Shown(claim, old.revision), Shown(old.claim, revision), Shown(claim, revision)]
            engine = engine._replace(claim=claim, revision=revision)
        return world._replace(rollout=engine, rollout_does=tuple(does))

    def boot(self, world: World, read: Claim | None, known: bool) -> World:
        """Serving holds nothing before it has respected what the page says."""
        fresh = Serving(self.total, handing_over=True)
        looked, effects = self._looked(world, fresh, read, known)
        looked = Serving(0, knows=looked.knows)
        return world._replace(serving=looked, serving_does=tuple(effects))

    def serving_looks(
        self, world: World, read: Claim | None, known: bool = True, used: int = 0
    ) -> World:
        assert world.serving is not None
        looked, effects = self._looked(world, world.serving, read, known, used=used, slice_=1)
        return world._replace(serving=looked, serving_does=tuple(effects))

    def _looked(
        self, world: World, engine: Serving, read: Claim | None, known: bool, **more: int
    ) -> tuple[Serving, list[Effect]]:
        sizes: dict[str, Any] = {"total": self.total, "blocks": self.total}
        lives = world.rollout is not None
        effects, handing_over, could_read = self._respect(
            engine,
            read,
            writer_lives=self._said(lives=lives, known=known),
            known_lives=self._said(lives=engine.knows == Known.PRESENT, known=known),
            headroom=self.headroom,
            **sizes,
            **more,
        )
        knows = engine.knows
        if could_read:
            knows = Known.PRESENT if lives else Known.DEAD
        return engine._replace(knows=knows, handing_over=handing_over), effects

    def started(self, world: World) -> World:
        """A serving engine that was run in the first one's place is there as the second one."""
        owns, said = self._stands(taken=True)
        assert not owns
        return heard(swapped(world), said)

    def stood(self, world: World) -> World:
        """The second serving engine has looked who owns serving's half."""
        owns, said = self._stands(taken=world.serving is not None)
        if owns:
            return swapped(world)._replace(second=None, second_does=(), rival=Rival.OWNER)
        return heard(world, said)

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

    def calm(self, world: World, so: Calm) -> World:
        """The end when nothing dies, fails or is in use any more."""
        if so.wanted is None:
            world = killed(world)
        elif world.rollout is None:
            world = born(world)
        if world.serving is None:
            taken_over = world.second is not None and not so.both
            world = self.stood(world) if taken_over else self.boot(world, None, True)
            if world.serving is None:
                return world
        if so.both and world.second is None:
            world = self.started(self.boot(swapped(world), None, True))
        elif not so.both:
            world = world._replace(second=None, second_does=())
        for _ in range(4 * self.total + 1):
            before, world = world, published(settled(world))
            world = settled(self.serving_looks(world, Claim(*world.shown)))
            if so.both:
                looked = self.serving_looks(swapped(world), Claim(*world.shown))
                world = self.stood(settled(swapped(looked)))
            elif world.rival == Rival.HERE:
                world = world._replace(rival=Rival.NONE)
            if so.wanted is not None:
                told = self.read(published(world), late=so.late)
                wanted = None if told is None else so.wanted
                world = settled(self.rollout_looks(published(world), wanted, told))
            if world == before:
                break
        return world


def born(world: World) -> World:
    """A new rollout engine, above all revisions there ever were."""
    engine = Rollout(0, 0, max(_revisions(world)) + 1)
    left = world.left + (world.rollout.usable if world.rollout else 0)
    world = killed(world)
    return world._replace(rollout=engine, shown=Shown(0, engine.revision), left=left)


def killed(world: World) -> World:
    def bereft(one: Serving | None) -> Serving | None:
        return one._replace(knows=Known.DEAD) if one and one.knows == Known.PRESENT else one

    serving, second = bereft(world.serving), bereft(world.second)
    return world._replace(rollout=None, rollout_does=(), serving=serving, second=second)


def heard(world: World, said: bool) -> World:
    """Of a second serving engine."""
    return world._replace(rival=max(world.rival, Rival.HERE)) if said else world


def swapped(world: World) -> World:
    return world._replace(
        serving=world.second,
        serving_does=world.second_does,
        second=world.serving,
        second_does=world.serving_does,
    )


def published(world: World) -> World:
    assert world.serving is not None
    rival = Rival.HERE if world.rival == Rival.OWNER else world.rival
    return world._replace(told=Told(world.serving.quota, world.serving.revision), rival=rival)


def settled(world: World) -> World:
    """When all have done what they are about to do."""
    while world.rollout_does:
        world = rollout_goes_on(world)
    while world.serving_does:
        world = serving_goes_on(world)
    while world.second_does:
        world = swapped(serving_goes_on(swapped(world)))
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
    does = (*world.rollout_does, *world.serving_does, *world.second_does)
    named = [world.rollout, world.serving, world.second, world.shown, *does]
    found = {one.revision for one in named if one is not None and not isinstance(one, Moved)}
    return found | {world.told.acked, 0}


def renumbered(world: World) -> World:
    """The same with the smallest revisions."""
    number = {revision: n for n, revision in enumerate(sorted(_revisions(world)))}

    def smaller(one: Any) -> Any:
        if one is None or isinstance(one, Moved):
            return one
        return one._replace(revision=number[one.revision])

    return world._replace(
        rollout=smaller(world.rollout),
        rollout_does=tuple(map(smaller, world.rollout_does)),
        serving=smaller(world.serving),
        serving_does=tuple(map(smaller, world.serving_does)),
        second=smaller(world.second),
        second_does=tuple(map(smaller, world.second_does)),
        shown=smaller(world.shown),
        told=world.told._replace(acked=number[world.told.acked]),
    )
