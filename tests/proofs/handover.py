"""Both engines' side of the KV hand-over as they are, around numbers instead of blocks and pages.

`follow` runs the rollout engine's `Borrower.follow_memory` with a policy that wants anything,
`respect` runs serving's `Lender.respect`. Both return what they did that others can see, in order.
Numbers may be unknown ones (see `symbolic`); a block is one byte. `admitted`, `relied` and `said`
are the other rules of the page: who owns a section, when serving's facts count, and who lives.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from rose.executor import borrower, lender, memory, page, processes
from rose.executor.facts import FACTS_S, LeaseState, ServingFacts

NEW, OLD = processes.Writer(2, 2), processes.Writer(1, 1)
NOW = 100.0


class Moved(NamedTuple):
    """An engine has more or less memory."""

    before: Any
    after: Any


class Staked(NamedTuple):
    """The rollout engine has published a claim."""

    claim: Any
    revision: Any
    usable: Any


class Acked(NamedTuple):
    """Serving has noted that its quota respects a claim."""

    claim: Any
    revision: Any
    quota: Any


Effect = Moved | Staked | Acked


class Parking:
    """As `vllm.parking`; `used` blocks are held by requests."""

    block_bytes = 1

    def __init__(self, usable: Any, used: Any, blocks: Any) -> None:
        self.usable, self.used, self.blocks = usable, used, blocks
        self.effects: list[Effect] = []

    def set_usable(self, wanted: Any) -> Any:
        before, wanted = self.usable, max(0, min(wanted, self.blocks))
        self.usable = max(wanted, self.used) if wanted < before else wanted
        self.effects.append(Moved(before, self.usable))
        return self.usable


class Rollout(NamedTuple):
    usable: Any
    claim: Any
    revision: Any


class Told(NamedTuple):
    """What the rollout engine has read of serving's half."""

    quota: Any
    acked: Any


def follow(
    engine: Rollout,
    wanted: Any,
    told: Told | None,
    *,
    total: Any,
    blocks: Any,
    used: Any = 0,
    may_end: bool = False,
    seen_at: Any = -math.inf,
    now: Any = NOW,
) -> list[Effect]:
    """`told` is None when serving's facts cannot be relied upon, as since `seen_at`; `wanted` is
    None when the policy decides. `may_end`: turns, so that nothing is in use."""
    parking = Parking(0, 0, 0)

    def publish() -> None:
        parking.effects.append(Staked(border.claim, border.revision, parking.usable))

    def end_turns(_: Any) -> None:
        parking.used = 0

    facts = told and ServingFacts(kv_quota=told.quota, kv_acked=told.acked)
    sheet: Any = SimpleNamespace(
        ring=lambda _: None, lending=lambda _: facts and SimpleNamespace(facts=facts)
    )
    terms = memory.MemoryTerms(total, 0.0, rollout_max=blocks)
    mine = borrower.Borrower(sheet, parking, publish, terms, dedicated=False, clock=lambda: NOW)
    mine.state, mine._seen_at, mine._clock = LeaseState.ACTIVE, seen_at, lambda: now
    border = mine.border
    parking.effects.clear()
    parking.used, parking.blocks = used, blocks
    parking.usable, border.claim, border.revision = engine
    border._budget = memory.Budget(parking.usable)
    with _wants(wanted):
        mine.follow_memory(sys.maxsize, end_turns if may_end else None)
    return parking.effects


def _wants(wanted: Any) -> AbstractContextManager[Any]:
    if wanted is None:
        return nullcontext()
    budget = memory.Budget(wanted)
    return mock.patch.multiple(memory, decide=lambda *_: budget, reach=lambda *_: 0)


class Serving(NamedTuple):
    quota: Any
    claim: Any = 0
    revision: Any = 0
    """Of the claim that the quota respects."""
    knows: Any = False
    """It has read a claim, of a rollout engine that it can ask the kernel about."""
    handing_over: bool = False


class Claim(NamedTuple):
    """What serving has read of the rollout engine's half."""

    claim: Any
    revision: Any


def respect(
    engine: Serving,
    read: Claim | None,
    *,
    writer_lives: bool,
    known_lives: bool,
    total: Any,
    headroom: Any,
    blocks: Any,
    used: Any = 0,
    slice_: int = 1 << 24,
) -> tuple[list[Effect], bool, bool]:
    """`read` is None when the half is unreadable. Who lives is as the kernel says: who wrote the
    half, and who wrote it when serving could read it last. Also returns whether it is still handing
    over, and whether it could read."""
    parking = Parking(engine.quota, used, blocks)
    lives = {NEW: writer_lives, OLD: known_lives}
    facts = read and SimpleNamespace(kv_claim=read.claim, kv_revision=read.revision)
    sheet: Any = SimpleNamespace(
        rollout=lambda: facts and SimpleNamespace(facts=facts, writer=NEW),
        processes=SimpleNamespace(alive=lambda writer: lives[writer]),
        rollout_writer_alive=lambda: writer_lives,
        kv_total=total,
    )
    quota: Any = parking
    mine = lender.Lender(sheet, quota, headroom, nullcontext(), slice_bytes=slice_, owns=True)
    mine.claim, mine.revision, mine.handing_over = (
        engine.claim,
        engine.revision,
        engine.handing_over,
    )
    mine.claimant = OLD if engine.knows else None
    if mine.respect(force=engine.handing_over):
        parking.effects.append(Acked(mine.claim, mine.revision, parking.usable))
    return parking.effects, mine.handing_over, mine.claimant is NEW


def admitted(section: str, *, taken: bool) -> bool:
    """Whether an engine that starts may write the section, when another one does."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "page")
        sheets = [page.Page.create(path, kv_total=1, device="cpu:0") for _ in range(2)]
        if taken:
            sheets[0].own(section)
        owns = sheets[1].own(section)
        for sheet in sheets:
            sheet.close()
        return owns


def stands(*, taken: bool) -> tuple[bool, bool]:
    """Whether a serving engine that does not own its section does after a look, and whether it has
    said that it is here."""
    said: list[float] = []
    sheet: Any = SimpleNamespace(own=lambda name: admitted(name, taken=taken), intrude=said.append)
    mine = lender.Lender(sheet, Parking(0, 0, 0), 0.0, nullcontext(), slice_bytes=1, owns=False)
    mine.stand(NOW)
    return mine.owns, bool(said)


def relied(*, late: bool, rival: bool) -> bool:
    """Whether the rollout engine relies on serving's facts."""
    return lending(NOW - 2 * FACTS_S if late else NOW, NOW if rival else 0.0, NOW)


def lending(written: Any, intruded: Any, now: Any) -> bool:
    reading = SimpleNamespace(facts=ServingFacts(written=written))
    sheet: Any = SimpleNamespace(serving=lambda: reading, _intruded=lambda: intruded)
    sheet.rival = lambda now: page.Page.rival(sheet, now)
    return page.Page.lending(sheet, lambda: now) is not None


def said(*, lives: bool, known: bool) -> bool:
    """Whether a process lives, by the kernel; it may have no descriptors left to tell."""
    me = os.getpid()
    writer = processes.Writer(me, processes.process_start(me) if lives else -1)
    kernel = processes.Kernel()
    with nullcontext() if known else mock.patch.object(processes, "_stat", side_effect=NO_MORE):
        alive = kernel.alive(writer)
    for descriptor in kernel._pidfds.values():
        os.close(descriptor)
    return alive


NO_MORE = OSError(errno.EMFILE, "too many open files")
