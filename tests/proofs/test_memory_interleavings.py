"""The two engines never hold more than a tiny device has, and get what they want when it is calm.

Every state that any history can lead to is visited (see `interleavings`); the proof for devices of
any size is in `test_memory_proof`.
"""

from __future__ import annotations

from types import ModuleType

import pytest
from tests.proofs import handover
from tests.proofs.bugs import Bug, edited, planted
from tests.proofs.interleavings import TOTAL, Device, World

from rose.executor import memory
from rose.executor.vllm import border

HEADROOMS = [0.0, 0.5]


def too_much(headroom: float) -> World | None:
    return next((world for world in Device(headroom).worlds() if world.held > TOTAL), None)


@pytest.mark.parametrize("headroom", HEADROOMS)
def test_no_history_leads_to_more_than_there_is(headroom: float) -> None:
    assert too_much(headroom) is None


@pytest.mark.parametrize("headroom", HEADROOMS)
def test_from_everywhere_both_get_what_they_want_when_it_is_calm(headroom: float) -> None:
    device = Device(headroom)
    most = TOTAL - int(headroom * TOTAL)
    for world in device.worlds():
        for wanted in range(most + 1):
            rollout, _, serving, *_ = device.calm(world, wanted)
            assert rollout is not None and serving is not None
            assert (rollout.usable, serving.quota) == (wanted, TOTAL - wanted), world


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="a claim half respected when its engine dies is not undone")
def test_serving_gets_all_when_the_rollout_engine_is_gone() -> None:
    device = Device(0.0)
    for world in device.worlds():
        serving = device.calm(world, None).serving
        assert serving is not None
        assert serving.quota == TOTAL, world


BUGS: dict[str, tuple[ModuleType, str, str]] = {
    "any revision is agreed": (memory, "acked >= revision and ", ""),
    "any quota is agreed": (memory, " and serving_quota + claim <= total", ""),
    "quota ignores the claim": (memory, "total - claim)", "total)"),
    "claim what is wanted": (border, "return self._stake(reached)", "return self._stake(wanted)"),
    "same revision again": (border, "self.revision += 1", "self.revision += 0"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    module, sound, broken = BUGS[bug]
    with planted(module, Bug(sound, broken)):
        assert any(too_much(headroom) for headroom in HEADROOMS)


def test_a_bug_of_serving_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    early = Bug("if reached > wanted:", "if False:")
    monkeypatch.setattr(handover, "SERVING", edited(handover.SERVING, early))
    assert too_much(0.0) is not None
