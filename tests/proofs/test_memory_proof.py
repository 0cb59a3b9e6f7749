"""The two engines never hold more than the device has, for all numbers and in every interleaving.

*By induction.* Nothing that can happen leads out of the states with `protocol.holds`.
*Of the code.* `Border.follow` and `_respect_claim` run on unknown numbers (see `symbolic`), and all
that others can see of them is moves of the protocol, which are made with the real `may_use` and
`serving_quota`. The policy may want anything.
*Of the policy.* Whatever `decide` is asked, it lends only beside the headroom.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import z3
from tests.proofs import handover
from tests.proofs.bugs import Bug, edited, planted
from tests.proofs.handover import Acked, Claim, Moved, Rollout, Serving, Told, follow, respect
from tests.proofs.protocol import (
    ANY,
    DEVICE,
    HEADROOM,
    NOTHING,
    agreed,
    holds,
    kept,
    kv_max,
    moves,
    quota_beside,
    total,
)
from tests.proofs.symbolic import Number, counterexample, paths, term, value, whole

from rose.executor import memory
from rose.executor.memory import POLICIES
from rose.executor.vllm import border

usable, claim, revision, used, wanted = z3.Ints("usable claim revision used wanted")
quota, acked, read_claim, read_revision = z3.Ints("quota acked read_claim read_revision")


@pytest.fixture(autouse=True)
def _unknown_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "int", whole, raising=False)


def unsafe_moves() -> Iterator[str]:
    for name, when, then in moves(ANY):
        if model := counterexample(holds(then), DEVICE, holds(ANY), when):
            yield f"{name}: {model}"


def wrong_moves_of_rollout() -> Iterator[str]:
    blocks = z3.Int("blocks")
    given = z3.And(used >= 0, used <= usable, usable <= claim, wanted >= 0, wanted <= blocks)
    engine = Rollout(Number(usable), Number(claim), Number(revision))
    sizes = {"total": Number(total), "blocks": Number(blocks), "used": Number(used)}
    for told, may_end in product((None, Told(Number(quota), Number(acked))), (False, True)):
        run = partial(follow, engine, Number(wanted), told, may_end=may_end, **sizes)
        for condition, effects in paths(run, DEVICE, given):
            on_page = claim, revision
            for effect in effects:
                if isinstance(effect, Moved):
                    before, after = map(term, effect)
                    may_raise = agreed(*on_page, acked, quota) if told else False
                    fine = z3.Or(after <= before, z3.And(may_raise, after <= on_page[0]))
                else:
                    staked, newer, held = map(term, effect)
                    fine = z3.And(held <= staked, on_page[1] < newer)
                    on_page = staked, newer
                if model := counterexample(fine, DEVICE, given, condition):
                    yield f"{effect}: {model}"


def wrong_moves_of_serving() -> Iterator[str]:
    given = z3.And(used >= 0, used <= quota, quota <= kv_max)
    sizes = {"total": Number(total), "blocks": Number(kv_max), "used": Number(used)}
    some = Claim(Number(read_claim), Number(read_revision))
    for read, lives, knows, forced in product((some, None), *[(False, True)] * 3):
        engine = Serving(Number(quota), Number(claim), Number(revision), knows, forced)
        run = partial(respect, engine, read, rollout_lives=lives, headroom=HEADROOM, **sizes)
        seen = (read_claim, read_revision) if read else (total, z3.IntVal(0))
        seen = seen if lives else (z3.IntVal(0), z3.IntVal(0))
        most = quota_beside(seen[0])
        for condition, (effects, _) in paths(run, DEVICE, given):
            for effect in effects:
                if isinstance(effect, Moved):
                    before, after = map(term, effect)
                    fine = z3.And(after >= most, z3.Or(after == most, after <= before))
                else:
                    assert isinstance(effect, Acked)
                    fine = z3.And(
                        [a == b for a, b in zip(map(term, effect), (*seen, most), strict=True)]
                    )
                if model := counterexample(fine, DEVICE, given, condition):
                    yield f"{effect}: {model}"


def revisions_come_again() -> Iterator[str]:
    """Whether a later engine begins below a revision of an earlier one, which changes its claim
    less than once per microsecond."""
    parking: Any = handover.Parking(0, 0, 1)
    with mock.patch.object(border.time, "monotonic_ns", side_effect=(5_000_000, 6_000_000)):
        early, late = (
            border.Border(handover.PAGE, parking, lambda: None, dedicated=False) for _ in range(2)
        )
    for change in range(999):
        early._stake((change + 1) % 2)
    if not 0 < early.revision < late.revision:
        yield f"{late.revision} after {early.revision}"


def lent_too_much() -> Iterator[str]:
    """What the policy does against its law."""
    now, calm_since = z3.Reals("now calm_since")
    need, most, frozen_in, rl_step = z3.Ints("need most frozen_in rl_step")
    given = z3.And(usable >= 0, usable <= most, need >= 0)
    for policy, frozen, active, alive in product(POLICIES, *[(False, True)] * 3):
        frozen_then = Number(frozen_in) if frozen else None
        before = memory.Budget(Number(usable), Number(calm_since), frozen_then)
        demand = memory.Demand(active, Number(need), alive, Number(rl_step))
        terms = memory.MemoryTerms(Number(total), HEADROOM, policy, Number(most))
        low = value(lambda terms=terms: memory.low_water(terms.total, terms.headroom))
        decide = partial(memory.decide, before, demand, terms, Number(now))
        for condition, budget in paths(decide, DEVICE, given):
            after = term(budget.bytes)
            grown, pressed = after > usable, z3.And(usable > 0, total - usable - need < low)
            laws = {
                "not more than the engine can hold": z3.And(after >= 0, after <= most),
                "nothing to a dormant engine": z3.Or(active, after == 0),
                "no growth beside a dead engine": z3.Or(alive, z3.Not(grown)),
                "growth leaves the headroom": z3.Implies(grown, after + need + kept <= total),
                "pressure halves": z3.Implies(pressed, 2 * after <= usable),
            }
            for name, law in laws.items():
                if model := counterexample(law, DEVICE, given, condition):
                    yield f"{policy}, {name}: {model}"


def headroom_taken() -> Iterator[str]:
    """Claims beside which serving would have less than its headroom."""
    least = z3.If(kept < kv_max, kept, kv_max)
    if model := counterexample(quota_beside(claim) >= least, DEVICE):
        yield f"{model}"


def refused_for_nothing() -> Iterator[str]:
    """Claims beside the headroom that are not agreed to though serving has made room."""
    may_raise = agreed(claim, revision, revision, quota_beside(claim))
    if model := counterexample(may_raise, DEVICE, claim + kept <= total):
        yield f"{model}"


PROOFS = {
    "no claim takes the headroom": headroom_taken,
    "claims beside the headroom are agreed to": refused_for_nothing,
    "the policy leaves the headroom": lent_too_much,
    "revisions do not come again": revisions_come_again,
    "nothing leads to too much": unsafe_moves,
    "rollout keeps to the protocol": wrong_moves_of_rollout,
    "serving keeps to the protocol": wrong_moves_of_serving,
}


@pytest.mark.parametrize("proof", PROOFS)
def test_proof(proof: str) -> None:
    assert next(PROOFS[proof](), None) is None


def test_the_protocol_can_begin() -> None:
    assert counterexample(holds(NOTHING), DEVICE) is None


BUGS: dict[str, tuple[ModuleType, str, str]] = {
    "any revision is agreed": (memory, "acked >= revision and ", ""),
    "any quota is agreed": (memory, " and serving_quota + claim <= total", ""),
    "quota ignores the claim": (memory, "max(floor, total - claim)", "max(floor, total)"),
    "quota has no floor": (memory, "max(floor, total - claim)", "max(0, total - claim)"),
    "growth ignores need": (
        memory,
        "terms.total - demand.serving_need - int(",
        "terms.total - int(",
    ),
    "growth has no ceiling": (
        memory,
        "return Budget(min(grown, most), now",
        "return Budget(grown, now",
    ),
    "a dormant engine keeps": (memory, "return Budget(0, now, None)", "return budget"),
    "a dead engine is no limit": (memory, "if not demand.serving_alive:", "if False:"),
    "pressure cuts little": (memory, "min(budget.bytes // 2, most)", "min(budget.bytes, most)"),
    "use before agreement": (border, "serving is not None\n            and", "True or"),
    "say, then give back": (
        border,
        "        reached = self._parking.set_usable(wanted)\n        if reached > wanted and",
        "        self._stake(wanted)\n"
        "        reached = self._parking.set_usable(wanted)\n        if reached > wanted and",
    ),
    "claim what is wanted": (border, "return self._stake(reached)", "return self._stake(wanted)"),
    "raise, then say": (
        border,
        "        changed = self._stake(wanted)",
        "        self._parking.set_usable(wanted)\n        changed = self._stake(wanted)",
    ),
    "same revision again": (border, "self.revision += 1", "self.revision += 0"),
    "revisions from zero": (border, "time.monotonic_ns() // 1000", "0"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    module, sound, broken = BUGS[bug]
    with planted(module, Bug(sound, broken)):
        assert any(next(proof(), None) for proof in PROOFS.values())


BUGS_OF_SERVING = {
    "ack before lowering": Bug(
        "if reached > wanted:\n            return", "if False:\n            return"
    ),
    "keep the quota": Bug("reached = parking.set_usable(slice_end)", "reached = wanted"),
    "an unread claim is none": Bug(
        "claim, revision = device.page.kv_total, 0", "claim, revision = 0, 0"
    ),
    "a live engine is gone": Bug(
        "self._peer.alive(reading.writer)", "not self._peer.alive(reading.writer)"
    ),
}


@pytest.mark.parametrize("bug", BUGS_OF_SERVING)
def test_a_bug_of_serving_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "SERVING", edited(handover.SERVING, BUGS_OF_SERVING[bug]))
    assert next(wrong_moves_of_serving(), None) is not None
