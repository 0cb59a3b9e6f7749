"""The lease of a device, whatever is said and whoever dies: every state that can come about.

The model is `lending`: its laws are checked on every step from every state, and from every state it
ends, once all is calm, where everybody wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from typing import Any

import pytest
from tests.proofs.bugs import Bug, planted
from tests.proofs.lending import ACTIVE, DORMANT, DRAINING, Lending, World, answered, ends_step

from rose.cluster import custody, reporting
from rose.executor import borrower, lifecycle, memory
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


def taken_back_is_dormant(_: World, after: World) -> bool:
    return not after.obeyed or after.state == DORMANT


def nothing_is_ordered_on_what_is_taken_back(_: World, after: World) -> bool:
    """Nor would be, were the page written again."""
    return not after.taken_back or after.ordered == DORMANT


def what_is_taken_back_is_not_offered(_: World, after: World) -> bool:
    return not (after.taken_back and after.offered)


def a_fresh_engine_has_no_orders(_: World, after: World) -> bool:
    """Those to the one before are not meant for it."""
    return not after.fresh or after.ordered == DORMANT


def without_a_node_is_dormant(_: World, after: World) -> bool:
    return after.knows is not None or after.state == DORMANT


def dormant_wakes_only_by_order(before: World, after: World) -> bool:
    woke = before.state == DORMANT and after.state != DORMANT
    return not woke or before.ordered not in (DORMANT, DRAINING)


LAWS: tuple[Law, ...] = (
    dormant_gets_no_memory,
    dormant_has_no_memory_after_a_step,
    active_has_begun_with_memory,
    taken_back_takes_no_turns,
    taken_back_is_dormant,
    nothing_is_ordered_on_what_is_taken_back,
    what_is_taken_back_is_not_offered,
    a_fresh_engine_has_no_orders,
    without_a_node_is_dormant,
    dormant_wakes_only_by_order,
)


def broken(lending: Lending, laws: tuple[Law, ...] = LAWS) -> Iterator[str]:
    """Nor does anything but a late order meet with the answer that the device was taken back."""
    try:
        for before, after in lending.worlds():
            for law in laws:
                if not law(before, after):
                    yield f"{law.__name__}\n{before}\n{after}"
    except custody.TakenBack as error:
        yield str(error)


def goal(world: World, *, wanted: bool) -> tuple[LeaseState, Phase]:
    return (ACTIVE, Phase.ACTIVE) if wanted and world.offered else (DORMANT, Phase.DORMANT)


def stuck(lending: Lending) -> Iterator[str]:
    """States from which calm does not lead to what is wanted."""
    worlds = {after for _, after in lending.worlds()}
    for world, phase, wanted in product(worlds, Phase, (False, True)):
        end, held = lending.calm(world, phase, wanted=wanted)
        if (end.state, held) != goal(world, wanted=wanted):
            yield f"{world}, {phase}, wanted={wanted}\n{end}, {held}"


def test_every_step_keeps_the_laws() -> None:
    assert next(broken(Lending()), None) is None


def test_every_state_of_the_engine_comes_about() -> None:
    seen = {(after.state, after.taken_back) for _, after in Lending().worlds()}
    assert len(seen) == 2 * len(LeaseState)


def test_from_everywhere_calm_leads_to_what_is_wanted() -> None:
    assert next(stuck(Lending()), None) is None


@pytest.mark.parametrize("nonsense", ["", "revoke", "ACTIVATE", 1, True, [], {}, ["activate"]])
def test_an_answer_that_is_no_order_is_none(nonsense: Any) -> None:
    with pytest.raises(ValueError, match="no order"):
        answered(World(), nonsense)


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
        "order == Order.ACTIVATE and node.offered",
        "order == Order.ACTIVATE",
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
    "dormant has a budget": (
        memory,
        "if not demand.active or demand.unseen_s > UNSEEN_S",
        "if demand.unseen_s > UNSEEN_S",
    ),
    "taken back is not an order": (
        custody,
        "self.offered = False\n        self.order(LeaseState.DORMANT)",
        "self.offered = False",
    ),
    "taken back for a moment": (custody, "self.offered = False\n        self", "self"),
    "late orders count": (custody, "if state != LeaseState.DORMANT and not self.offered", "if 0"),
    "the page is forgotten": (
        custody,
        "bool(left.offered) if left is not None else not taken_back",
        "not taken_back",
    ),
    "the records are forgotten": (
        custody,
        "is not None else not taken_back",
        "is not None else True",
    ),
    "what is held goes on": (custody, "kept = self.offered and held", "kept = held"),
    "orders to the one before": (
        custody,
        "self.cold = True\n        self.order(LeaseState.DORMANT)",
        "self.cold = True",
    ),
    "orders are for ever": (
        borrower,
        "LeaseState.DORMANT if abandoned else self._ordered",
        "self._ordered",
    ),
    "no orders, no change": (borrower, "else LeaseState.DORMANT\n", "else self._ordered\n"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    module, sound, bad = BUGS[bug]
    with planted(module, Bug(sound, bad)):
        lending = Lending()
        assert next(broken(lending), None) or next(stuck(lending), None)
