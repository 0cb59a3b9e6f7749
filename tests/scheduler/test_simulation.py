"""Thousands of small disasters: no turn lost, none answered twice, every token right."""

from __future__ import annotations

import pytest
from tests.scheduler.simulated import CALM_AFTER_S, World
from tests.scheduler.trouble import run

SEEDS = 1000
EACH = 50


def check(seed: int) -> World:
    world = run(seed)
    replay = f"replay: run({seed}) of tests/scheduler/trouble.py"
    lost = [i for i in world.asks if not world.results[i] and i not in world.left]
    assert not lost, f"lost {lost}; {replay}"
    twice = [i for i, count in (world.results + world.ends).items() if count > 1]
    assert not twice, f"answered twice: {twice}; {replay}"
    assert not world.wrong, f"{world.wrong[0]}; {replay}"
    for engine in world.core.engines.values():
        held = [i for i in engine.turns if i not in world.left]
        assert not held, f"{engine.id} still holds {held}; {replay}"
        assert not engine.turns and not engine.uncached and not engine.expected, replay
    assert all(job.running == 0 for job in world.core.jobs.values()), replay
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_no_turn_is_lost_or_wrong(first: int) -> None:
    worlds = [check(seed) for seed in range(first, first + EACH)]
    faults = sum(sum(world.cuts.values()) for world in worlds)
    assert faults > EACH, "the simulation does not disturb"
    assert any(turns for world in worlds for turns in [world.core.cuts])


def test_a_seed_replays_everything() -> None:
    runs = [check(12345) for _ in range(2)]
    first, second = ([world.now, dict(world.results), dict(world.core.cuts)] for world in runs)
    assert first == second
    assert runs[0].now > CALM_AFTER_S
