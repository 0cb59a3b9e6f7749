"""The engines never hold more than a tiny device has, and get what they want when it is calm.

Every state that any history can lead to is visited (see `interleavings`); the proof for devices of
any size is in `test_memory_proof`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from types import ModuleType

import pytest
from tests.proofs.bugs import Bug, planted
from tests.proofs.interleavings import Calm, Device, World, renumbered, settled

from rose.executor import border, borrower, lender, memory, page, processes

DEVICES = {
    "half is serving's": Device(0.5),
    "no headroom": Device(0.0),
    "two serving engines": Device(0.0, 1, two=True),
}


@pytest.fixture(scope="module", params=DEVICES)
def visited(request: pytest.FixtureRequest) -> tuple[Device, list[World]]:
    """A device and every state it can be in."""
    device = DEVICES[request.param]
    return device, list(device.worlds())


def unsafe(device: Device, worlds: Iterable[World]) -> Iterator[str]:
    return (f"{world}" for world in worlds if world.held > device.total)


def goal(device: Device, so: Calm) -> tuple[int | None, int, int | None]:
    """What the rollout engine and each serving engine have in the end."""
    lent = None if so.wanted is None else 0 if so.late or so.both else so.wanted
    left = device.total - (lent or 0)
    return lent, left, left if so.both else None


def wanting(device: Device, worlds: Iterable[World], calms: Iterable[Calm]) -> Iterator[str]:
    """States from which calm does not lead to what there is for each."""
    for world, so in product({renumbered(settled(world)) for world in worlds}, calms):
        rollout, _, serving, _, second, *_ = device.calm(world, so)
        has = tuple(one and one[0] for one in (rollout, serving, second))
        if has != goal(device, so):
            yield f"{world}, then {so}: {rollout}, {serving}, {second}"


def calms(device: Device) -> Iterator[Calm]:
    """All is well, the rollout engine is gone, serving's facts are late, or there are two of it."""
    most = device.total - int(device.headroom * device.total)
    yield from (Calm(wanted) for wanted in range(most + 1))
    yield from (Calm(None), Calm(most, late=True))
    if device.two:
        yield from (Calm(None, both=True), Calm(most, both=True))


def test_no_history_leads_to_more_than_there_is(visited: tuple[Device, list[World]]) -> None:
    assert next(unsafe(*visited), None) is None


def test_calm_gives_all_what_they_want(visited: tuple[Device, list[World]]) -> None:
    assert next(wanting(*visited, list(calms(visited[0]))), None) is None


BUGS: dict[str, tuple[ModuleType, str, str]] = {
    "any revision is agreed": (memory, "acked >= revision and ", ""),
    "any quota is agreed": (memory, " and serving_quota + claim <= total", ""),
    "quota ignores the claim": (memory, "total - claim)", "total)"),
    "use before agreement": (border, "serving is not None\n            and", "True or"),
    "claim what is wanted": (border, "return self._stake(reached)", "return self._stake(wanted)"),
    "same revision again": (border, "self.revision += 1", "self.revision += 0"),
    "keep beside late facts": (memory, " or demand.unseen_s > UNSEEN_S", ""),
    "late facts are seen": (page, "or not reading.facts.fresh(now) ", ""),
    "unseen is not counted": (
        borrower,
        "unseen_s=0.0 if self._dedicated else now - self._seen_at",
        "unseen_s=0.0",
    ),
    "not known to live is dead": (
        processes,
        "except OSError:\n            return None",
        "except OSError:\n            self._bury(writer)\n            return None",
    ),
    "a dead one's claim stays": (
        lender,
        "        else:\n            claim, revision = 0, 0",
        "        else:\n            claim, revision = self.claim, self.revision",
    ),
    "half respected is respected": (
        lender,
        "in_force and parking.usable == wanted and",
        "in_force and",
    ),
    "anybody may start": (
        page,
        "raise\n            return False",
        "raise\n            return True",
    ),
}


def found(device: Device) -> bool:
    if next(unsafe(device, device.worlds()), None):
        return True
    return next(wanting(device, device.worlds(), list(calms(device))), None) is not None


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    module, sound, broken = BUGS[bug]
    with planted(module, Bug(sound, broken)):
        assert any(found(Device(*size)) for size in ((0.0, 1), (0.0, 2)))


BUGS_OF_TWO: dict[str, tuple[ModuleType, str, str]] = {
    "a rival is no reason": (page, " or self.rival(now):", ":"),
    "says nothing": (lender, "self._page.intrude(now)", "pass"),
    "never owns": (lender, 'self.owns or self._page.own("serving")', "self.owns"),
}


@pytest.mark.parametrize("bug", BUGS_OF_TWO)
def test_a_bug_beside_a_second_serving_engine_is_found(bug: str) -> None:
    module, sound, broken = BUGS_OF_TWO[bug]
    with planted(module, Bug(sound, broken)):
        assert found(Device(0.0, 1, two=True))
