"""What befalls a simulated cluster: who asks for what, and when something breaks.

Engines are revoked, crash, hang, change versions, become slow, cannot be reached for a while though
they work; clients ask twice or leave; the scheduler dies. A seed decides about all of it.
"""

from __future__ import annotations

from tests.scheduler.simulated import CALM_AFTER_S, World

from rose.scheduler.turn import Ask


def run(seed: int) -> World:
    """A cluster's whole life."""
    world = World(seed)
    plan(world)
    world.run()
    return world


def plan(world: World) -> None:
    rng = world.random
    for number in range(rng.randint(5, 25)):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 300))]
        ask = Ask(
            id=f"r{number}/0.0",
            job=rng.choice(["a", "b"]),
            prompt=prompt,
            max_tokens=rng.randint(1, 60),
            seed=number,
            trajectory=f"t{number % 5}",
        )
        came = rng.uniform(0.0, 20.0)
        world.at(came, lambda a=ask: world.ask(a))
        if rng.random() < 0.3:
            world.at(came + rng.uniform(0.0, 5.0), lambda a=ask: world.ask(a))
        if rng.random() < 0.1:
            world.at(came + rng.uniform(0.0, 5.0), lambda i=ask.id: world.leave(i))
    for _ in range(rng.randint(0, 12)):
        world.at(rng.uniform(0.0, CALM_AFTER_S - 10.0), lambda: fault(world))
    for engine in world.engines.values():
        if engine.lent:
            world.at(rng.uniform(0.0, 3.0), lambda e=engine: world.report(e))


def fault(world: World) -> None:
    engine = world.random.choice(list(world.engines.values()))
    kind = world.random.choice(
        ["crash", "revoke", "hang", "version", "scheduler", "slow", "partition"]
    )
    world.cuts[kind] += 1
    span = world.random.uniform(0.5, 9.0)
    match kind:
        case "crash":
            engine.alive, engine.active = False, not engine.lent
            world.at(span, lambda: setattr(engine, "alive", True))
        case "partition":
            engine.reached = world.now + 2 * span
        case "revoke":
            engine.revoked = True
            world.at(span, lambda: setattr(engine, "revoked", False))
        case "hang":
            engine.stuck = True
            if engine.id == "e0" or world.random.random() < 0.7:  # others may hang for ever
                world.at(span, lambda: setattr(engine, "stuck", False))
        case "version":
            engine.version += 1
            if world.up and engine.id in world.core.engines:
                world.core.engines[engine.id].version = str(engine.version)
        case "scheduler":
            world.die()
        case "slow":
            engine.token_s *= 4
            world.at(span, lambda: setattr(engine, "token_s", engine.token_s / 4))
