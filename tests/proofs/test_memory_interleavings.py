"""The two engines never hold more than a tiny device has, and get what they want when it is calm.

Every state that any history can lead to is visited (see `interleavings`); the proof for devices of
any size is in `test_memory_proof`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from types import ModuleType

import pytest
from tests.proofs import handover
from tests.proofs.bugs import Bug, edited, planted
from tests.proofs.interleavings import TOTAL, Device, World, renumbered, settled

from rose.executor import memory
from rose.executor.vllm import border


@pytest.fixture(scope="module", params=[0.5, 0.0])
def visited(request: pytest.FixtureRequest) -> tuple[Device, list[World]]:
    """A device and every state it can be in."""
    device = Device(request.param)
    return device, list(device.worlds())


def unsafe(worlds: Iterable[World]) -> Iterator[str]:
    return (f"{world}" for world in worlds if world.held > TOTAL)


def wanting(device: Device, worlds: Iterable[World], claims: Iterable[int | None]) -> Iterator[str]:
    """States from which calm does not lead to what there is for each; None: without rollouts."""
    for world, claim in product({renumbered(settled(world)) for world in worlds}, claims):
        rollout, _, serving, *_ = device.calm(world, claim)
        has = rollout.usable if rollout else None
        if not serving or (has, serving.quota) != (claim, TOTAL - (claim or 0)):
            yield f"{world} wants {claim}: {rollout}, {serving}"


def beside_headroom(device: Device) -> range:
    return range(TOTAL - int(device.headroom * TOTAL) + 1)


def test_no_history_leads_to_more_than_there_is(visited: tuple[Device, list[World]]) -> None:
    assert next(unsafe(visited[1]), None) is None


def test_calm_gives_both_what_they_want(visited: tuple[Device, list[World]]) -> None:
    assert next(wanting(*visited, beside_headroom(visited[0])), None) is None


def keeps_something() -> bool:
    """Serving does not get all back when the rollout engine is gone."""
    device = Device(0.0)
    return next(wanting(device, device.worlds(), [None]), None) is not None


def test_serving_gets_all_when_the_rollout_engine_is_gone() -> None:
    assert not keeps_something()


BUGS: dict[str, tuple[ModuleType, str, str]] = {
    "any revision is agreed": (memory, "acked >= revision and ", ""),
    "any quota is agreed": (memory, " and serving_quota + claim <= total", ""),
    "quota ignores the claim": (memory, "total - claim)", "total)"),
    "use before agreement": (border, "serving is not None\n            and", "True or"),
    "claim what is wanted": (border, "return self._stake(reached)", "return self._stake(wanted)"),
    "same revision again": (border, "self.revision += 1", "self.revision += 0"),
}


def found() -> bool:
    device = Device(0.5)
    if next(unsafe(device.worlds()), None):
        return True
    return next(wanting(device, device.worlds(), beside_headroom(device)), None) is not None


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    module, sound, broken = BUGS[bug]
    with planted(module, Bug(sound, broken)):
        assert found()


def test_a_bug_of_serving_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets = Bug("in_force and parking.usable == wanted and", "in_force and")
    monkeypatch.setattr(handover, "SERVING", edited(handover.SERVING, forgets))
    assert keeps_something()
