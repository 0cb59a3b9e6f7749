"""The two engines never hold more than the device has, for all numbers and in every interleaving.

*By induction.* Nothing that can happen leads out of the states with `protocol.holds`.
*Of the code.* `Borrower.follow_memory` and `Lender.respect` run on unknown numbers (see
`symbolic`), and all that others can see of them is moves of the protocol, which are made with the
real `may_use` and `serving_quota`. The policy may want anything. `Page.lending` and `Page.own`, on
any times and on a real page, let nobody read or start whom the protocol does not.
*Of the policy.* Whatever `decide` is asked, it lends only beside the headroom and what serving
needs or keeps warm, and nothing for long beside a serving engine that is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from types import ModuleType
from unittest import mock

import pytest
import z3
from tests.proofs import handover
from tests.proofs.bugs import Bug, planted
from tests.proofs.handover import Acked, Claim, Moved, Rollout, Serving, Told, follow, respect
from tests.proofs.protocol import (
    ANY,
    DEVICE,
    HEADROOM,
    NOTHING,
    RULES,
    agreed,
    holds,
    kept,
    kv_max,
    moves,
    quota_beside,
    total,
)
from tests.proofs.symbolic import Number, counterexample, highest, lowest, paths, term, value, whole

from rose.executor import border, borrower, lender, memory, page
from rose.executor.facts import FACTS_S
from rose.executor.memory import POLICIES, UNSEEN_S

usable, claim, revision, used, wanted = z3.Ints("usable claim revision used wanted")
quota, acked, read_claim, read_revision = z3.Ints("quota acked read_claim read_revision")


@pytest.fixture(autouse=True)
def _unknown_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, instead in {"int": whole, "min": lowest, "max": highest}.items():
        monkeypatch.setattr(memory, name, instead, raising=False)


def unsafe_moves(without: str = "") -> Iterator[str]:
    for name, when, then in moves(ANY, without):
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
        who = {"writer_lives": lives, "known_lives": knows}
        run = partial(respect, engine, read, headroom=HEADROOM, **who, **sizes)
        seen = (read_claim, read_revision) if read else (total, z3.IntVal(0))
        seen = seen if lives else (z3.IntVal(0), z3.IntVal(0))
        most = quota_beside(seen[0])
        for condition, (effects, _, _) in paths(run, DEVICE, given):
            if effects and knows and not (read and lives):
                yield f"{effects} without a word of one that lives"
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


def relied_upon_wrongly() -> Iterator[str]:
    """Facts of serving that are old, of a time to come, or beside a second serving engine."""
    written, intruded, now = z3.Reals("written intruded now")
    sound = z3.And(now - FACTS_S <= written, written <= now, intruded <= now - 2 * FACTS_S)
    run = partial(handover.lending, Number(written), Number(intruded), Number(now))
    for condition, relied in paths(run):
        if model := counterexample(sound == relied, condition):
            yield f"relied={relied}: {model}"


def owned_twice() -> Iterator[str]:
    for section in page.SECTION:
        owns = [handover.admitted(section, taken=taken) for taken in (False, True)]
        if owns != [True, False]:
            yield f"{section}: {owns}"


def kept_beside_unseen() -> Iterator[str]:
    """What rollout wants beside a serving engine that has not been seen for long enough, and more
    than it had, however short it was."""
    seen_at, now = z3.Reals("seen_at now")
    given = z3.And(usable >= 0, usable <= claim, seen_at <= now)
    engine, known = Rollout(Number(usable), Number(claim), Number(revision)), Number(total)
    times = {"seen_at": Number(seen_at), "now": Number(now)}
    run = partial(follow, engine, None, None, total=known, blocks=known, **times)
    for condition, effects in paths(run, DEVICE, given, claim <= total):
        after = [term(effect.after) for effect in effects if isinstance(effect, Moved)]
        left = after[-1] if after else usable
        fine = z3.And(left <= usable, z3.Implies(now - seen_at > UNSEEN_S, left == 0))
        if model := counterexample(fine, DEVICE, given, condition):
            yield f"{effects}: {model}"


def revisions_come_again() -> Iterator[str]:
    """Whether a later engine begins below a revision of an earlier one, which changes its claim
    less than once per microsecond."""
    parking, sheet = handover.Parking(0, 0, 1), mock.Mock()
    early, late = (
        border.Border(sheet, parking, mock.Mock(), dedicated=False, clock=lambda at=at: at)
        for at in (5.0, 5.001)
    )
    for change in range(999):
        early._stake((change + 1) % 2)
    if not 0 < early.revision < late.revision:
        yield f"{late.revision} after {early.revision}"


def lent_too_much() -> Iterator[str]:
    """What the policy does against its law."""
    now, calm_since, unseen = z3.Reals("now calm_since unseen")
    need, most, frozen_in, rl_step = z3.Ints("need most frozen_in rl_step")
    warm, useful = z3.Ints("warm useful")
    given = z3.And(usable >= 0, usable <= most, need >= 0, warm >= 0, useful >= 0, unseen >= 0)
    for policy, frozen, active in product(POLICIES, *[(False, True)] * 2):
        frozen_then = Number(frozen_in) if frozen else None
        before = memory.Budget(Number(usable), Number(calm_since), frozen_then)
        some = {"serving_warm": Number(warm), "useful": Number(useful)}
        demand = memory.Demand(active, Number(need), Number(unseen), Number(rl_step), **some)
        terms = memory.MemoryTerms(Number(total), HEADROOM, policy, Number(most))
        low = value(lambda terms=terms: memory.low_water(terms.total, terms.headroom))
        decide = partial(memory.decide, before, demand, terms, Number(now))
        for condition, budget in paths(decide, DEVICE, given):
            after = term(budget.bytes)
            seen, spare = z3.And(active, unseen == 0), total - usable - need
            pressed = z3.And(seen, usable > 0, spare < low)
            free = total - after - need - warm
            fits, enough = free >= kept, free >= (low if policy == "trim" else kept)
            laws = {
                "not more than the engine can hold": z3.And(after >= 0, after <= most),
                "nothing to a dormant engine": z3.Or(active, after == 0),
                "nothing beside one unseen": z3.Implies(unseen > UNSEEN_S, after == 0),
                "no growth beside one unseen": z3.Or(unseen == 0, after <= usable),
                "no cut for being late": z3.Or(
                    seen, unseen > UNSEEN_S, after == usable, z3.Not(active)
                ),
                "growth leaves the headroom": z3.Implies(after > usable, fits),
                "growth is of use": z3.Implies(after > usable, after <= useful),
                "pressure halves": z3.Implies(
                    z3.And(pressed, policy != "trim"), 2 * after <= usable
                ),
                "warm prefixes are given way": z3.Implies(
                    z3.And(seen, usable > 0, spare - warm < low), z3.Or(enough, after == 0)
                ),
                "and no further": z3.Implies(
                    z3.And(seen, z3.Or(z3.Not(pressed), policy == "trim"), after < usable),
                    z3.Or(
                        after == useful,
                        after == most,
                        after == 0,
                        free == (low if policy == "trim" else kept),
                    ),
                ),
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
    "a section has one owner": owned_twice,
    "only what can be relied upon is": relied_upon_wrongly,
    "nothing is kept beside one unseen": kept_beside_unseen,
    "revisions do not come again": revisions_come_again,
    "no claim takes the headroom": headroom_taken,
    "claims beside the headroom are agreed to": refused_for_nothing,
    "nothing leads to too much": unsafe_moves,
    "rollout keeps to the protocol": wrong_moves_of_rollout,
    "serving keeps to the protocol": wrong_moves_of_serving,
    "the policy leaves the headroom": lent_too_much,
}


@pytest.mark.parametrize("proof", PROOFS)
def test_proof(proof: str) -> None:
    assert next(PROOFS[proof](), None) is None


@pytest.mark.parametrize("rule", RULES)
def test_the_protocol_needs(rule: str) -> None:
    assert next(unsafe_moves(rule), None) is not None


def test_the_protocol_can_begin() -> None:
    assert counterexample(holds(NOTHING), DEVICE) is None


BUGS: dict[str, tuple[ModuleType, str, str]] = {
    "any revision is agreed": (memory, "acked >= revision and ", ""),
    "any quota is agreed": (memory, " and serving_quota + claim <= total", ""),
    "quota ignores the claim": (memory, "max(floor, total - claim)", "max(floor, total)"),
    "quota has no floor": (memory, "max(floor, total - claim)", "max(0, total - claim)"),
    "growth ignores need": (
        memory,
        "terms.total - demand.serving_need - demand.serving_warm",
        "terms.total - demand.serving_warm",
    ),
    "growth ignores prefixes": (
        memory,
        "terms.total - demand.serving_need - demand.serving_warm",
        "terms.total - demand.serving_need",
    ),
    "growth is of no use": (memory, "goal = min(most, demand.useful)", "goal = most"),
    "growth has no ceiling": (
        memory,
        "return Budget(min(grown, goal), now",
        "return Budget(grown, now",
    ),
    "prefixes are no reason": (memory, "if pressed else", "if False else"),
    "prefixes take all": (memory, "if urgent else most", "if urgent else most // 2"),
    "trim forgets prefixes": (
        memory,
        "wanted = demand.serving_need + demand.serving_warm",
        "wanted = demand.serving_need",
    ),
    "trim takes the whole headroom": (
        memory,
        "max(0, min(budget.bytes, brink))",
        "max(0, min(budget.bytes, brink + 1))",
    ),
    "a dormant engine keeps": (
        memory,
        "not demand.active or demand.unseen_s > U",
        "demand.unseen_s > U",
    ),
    "one unseen is no limit": (memory, " or demand.unseen_s > UNSEEN_S", ""),
    "a late one is none": (memory, "    if demand.unseen_s > 0.0:\n        return budget\n", ""),
    "a late one is a reason": (memory, "> UNSEEN_S:", "> 0.0:"),
    "unseen is not counted": (
        borrower,
        "unseen_s=0.0 if self._dedicated else now - self._seen_at",
        "unseen_s=0.0",
    ),
    "old facts count": (page, "or not reading.facts.fresh(now) ", ""),
    "a rival does not count": (page, " or self.rival(now):", ":"),
    "a rival is forgotten soon": (page, "now - 2 * FACTS_S", "now - FACTS_S"),
    "anybody owns": (page, "raise\n            return False", "raise\n            return True"),
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
    "revisions from zero": (border, "int(clock() * 1e6)", "0"),
    "ack before lowering": (
        lender,
        "if reached > wanted:\n            return False",
        "if False:\n            return False",
    ),
    "keep the quota": (lender, "reached = parking.set_usable(slice_end)", "reached = wanted"),
    "an unread claim is none": (
        lender,
        "claim, revision = page.kv_total, 0",
        "claim, revision = 0, 0",
    ),
    "an unread claim is gone": (
        lender,
        "elif self.claimant is not None and page.processes.alive(self.claimant)",
        "elif False",
    ),
    "a live engine is gone": (
        lender,
        "not None and page.processes.alive(r",
        "not None and not page.processes.alive(r",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    module, sound, broken = BUGS[bug]
    with planted(module, Bug(sound, broken)):
        assert any(next(proof(), None) for proof in PROOFS.values())
