"""The lease of a device, whatever is said and whoever dies: every state that can come about.

The model is `lending`: its laws are checked on every step from every state, and from every state it
ends, once all is calm, where everybody wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from tests.proofs.bugs import Bug, planted
from tests.proofs.lending import ACTIVE, DORMANT, DRAINING, Lending, World, ends_step

from rose.cluster import reporting
from rose.executor import lifecycle, memory
from rose.executor.facts import LeaseState
from rose.scheduler import lease
from rose.scheduler.lease import Phase

Law = Callable[[World, World], bool]


def dormant_gets_no_memory(before: World, after: World) -> bool:
    return after.state != DORMANT or before.state != DORMANT or after.memory <= before.memory


def dormant_has_no_memory_after_a_step(_: World, after: World) -> bool:
    done = ends_step(after)
    return done.state != DORMANT or not (done.memory or done.turns)


def active_has_begun_with_memory(before: World, after: World) -> bool:
    began = after.state == ACTIVE and before.state in (DORMANT, LeaseState.ACTIVATING)
    return after.memory or not began


def taken_back_takes_no_turns(_: World, after: World) -> bool:
    """Once the engine has looked; those that run may still end."""
    return not (after.obeyed and lifecycle.takes_turns(after.state))


def dormant_wakes_only_by_order(before: World, after: World) -> bool:
    woke = before.state == DORMANT and after.state != DORMANT
    return not woke or before.ordered not in (DORMANT, DRAINING)


LAWS: tuple[Law, ...] = (
    dormant_gets_no_memory,
    dormant_has_no_memory_after_a_step,
    active_has_begun_with_memory,
    taken_back_takes_no_turns,
    dormant_wakes_only_by_order,
)


def broken(lending: Lending, law: Law) -> Iterator[str]:
    return (f"{a}\n{b}" for a, b in lending.worlds() if not law(a, b))


def goal(world: World) -> tuple[Phase, LeaseState]:
    held = world.wanted and world.offered
    return (Phase.ACTIVE, ACTIVE) if held else (Phase.DORMANT, DORMANT)


def stuck(lending: Lending) -> Iterator[str]:
    """States from which calm does not lead to what is wanted."""
    for world in {after for _, after in lending.worlds()}:
        end = lending.calm(world)
        if (end.phase, end.state) != goal(world):
            yield f"{world}\n{end}"


@pytest.mark.parametrize("law", LAWS)
def test_law(law: Law) -> None:
    assert next(broken(Lending(), law), None) is None


def test_every_state_of_lease_and_engine_comes_about() -> None:
    seen = {(after.phase, after.state) for _, after in Lending().worlds()}
    assert len(seen) == len(Phase) * len(LeaseState)


def test_from_everywhere_calm_leads_to_what_is_wanted() -> None:
    assert next(stuck(Lending()), None) is None


def taken_back_is_dormant(_: World, after: World) -> bool:
    return not after.obeyed or after.state == DORMANT


def test_what_is_taken_back_is_dormant_at_the_next_look() -> None:
    assert next(broken(Lending(), taken_back_is_dormant), None) is None


BUGS: dict[str, tuple[ModuleType, str, str]] = {
    "not offered is nothing": (lease, "if not word.offered:", "if False:"),
    "lost orders stay lost": (
        lease,
        "case Phase.ACTIVATING if not waits:",
        "case Phase.ACTIVATING if False:",
    ),
    "a lost drain stays lost": (
        lease,
        "case Phase.DRAINING if not waits:",
        "case Phase.DRAINING if False:",
    ),
    "others' engines stay": (
        lease,
        "case Phase.DORMANT if word.active:",
        "case Phase.DORMANT if False:",
    ),
    "never drained": (
        lease,
        "case Phase.DRAINING if not word.active:",
        "case Phase.DRAINING if False:",
    ),
    "cut and not noticed": (
        lease,
        "case Phase.ACTIVE if not word.active:",
        "case Phase.ACTIVE if False:",
    ),
    "held though not wanted": (
        lease,
        "Phase.ACTIVATING | Phase.ACTIVE if not wanted",
        "Phase.ACTIVATING if not wanted",
    ),
    "activate what was taken back": (
        reporting,
        'order == "activate" and node.offered',
        'order == "activate"',
    ),
    "orders not carried out": (reporting, "await node.drain()\n    return", "pass\n    return"),
    "turns first": (
        lifecycle,
        "if ordered == LeaseState.DORMANT:",
        "if ordered == LeaseState.DORMANT and empty:",
    ),
    "drain wakes": (lifecycle, "if empty or state == LeaseState.DORMANT else", "if empty else"),
    "drains for ever": (
        lifecycle,
        "if empty or state == LeaseState.DORMANT else",
        "if state == LeaseState.DORMANT else",
    ),
    "active without memory": (
        lifecycle,
        "LeaseState.ACTIVE if has_memory else",
        "LeaseState.ACTIVE if True else",
    ),
    "dormant holds": (lifecycle, "return state != LeaseState.DORMANT", "return True"),
    "dormant has a budget": (memory, "if not demand.active:", "if False:"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    module, sound, bad = BUGS[bug]
    with planted(module, Bug(sound, bad)):
        lending = Lending()
        assert any(next(broken(lending, law), None) for law in LAWS) or next(stuck(lending), None)
