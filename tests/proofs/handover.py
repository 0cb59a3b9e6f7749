"""Both engines' side of the KV hand-over as they are, around numbers instead of blocks and pages.

`follow` runs the rollout engine's `Border.follow` with a policy that wants anything, `respect` runs
serving's `_respect_claim`, taken out of its module's source because that imports vLLM. Both return
what they did that others can see, in order. Numbers may be unknown ones (see `symbolic`); a block
is one byte.
"""

from __future__ import annotations

import ast
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from rose.executor import memory
from rose.executor.vllm import border

SERVING = Path(border.__file__).with_name("serving.py").read_text()
PAGE: Any = SimpleNamespace(ring=lambda _: None)


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
) -> list[Effect]:
    """`told` is None when serving is dead; `may_end`: turns, so that nothing is in use."""
    parking = Parking(0, 0, 0)

    def publish() -> None:
        parking.effects.append(Staked(mine.claim, mine.revision, parking.usable))

    def end_turns(_: Any) -> None:
        parking.used = 0

    mine = border.Border(PAGE, parking, publish, dedicated=False)
    parking.effects.clear()
    parking.used, parking.blocks = used, blocks
    parking.usable, mine.claim, mine.revision = engine
    serving: Any = told and SimpleNamespace(kv_quota=told.quota, kv_acked=told.acked)
    demand: Any = SimpleNamespace()
    terms: Any = SimpleNamespace(total=total)
    with mock.patch.object(memory, "decide", return_value=memory.Budget(wanted)):
        mine.follow(demand, terms, serving, end_turns if may_end else None)
    return parking.effects


class Serving(NamedTuple):
    quota: Any
    claim: Any = 0
    revision: Any = 0
    """Of the claim that the quota respects."""
    knows: bool = False
    """It has read a claim of the rollout engine that it takes to be there."""
    handing_over: bool = False


class Claim(NamedTuple):
    """What serving has read of the rollout engine's half."""

    claim: Any
    revision: Any


def respect(
    engine: Serving,
    read: Claim | None,
    *,
    rollout_lives: bool,
    total: Any,
    headroom: Any,
    blocks: Any,
    used: Any = 0,
    slice_: int = 1 << 24,
) -> tuple[list[Effect], Any]:
    """`read` is None when the half is unreadable. Also returns whether it is still handing over."""
    parking = Parking(engine.quota, used, blocks)
    writer = SimpleNamespace(alive=rollout_lives)
    facts = read and SimpleNamespace(kv_claim=read.claim, kv_revision=read.revision)
    reading = facts and SimpleNamespace(facts=facts, writer=writer)
    mine = SimpleNamespace(
        options=SimpleNamespace(headroom=headroom),
        _bell_seen=-1,
        _looked_at=0.0,
        _renew_promise=lambda: None,
        _rollout=lambda: reading,
        _peer=SimpleNamespace(alive=lambda writer: writer.alive),
        _claimant=writer if engine.knows else None,
        _claim=engine.claim,
        _claim_revision=engine.revision,
        _handing_over=engine.handing_over,
        _news_for_rollout=False,
    )
    lives = {"bell": lambda _: 0, "rollout_writer_alive": lambda: rollout_lives}
    page = SimpleNamespace(kv_total=total, **lives)
    device = SimpleNamespace(page=page, parking=parking, guard=nullcontext())
    names = {"serving_quota": memory.serving_quota, "LIVENESS_S": 0.25, "SLICE": slice_}
    exec(_definition(SERVING, "_respect_claim"), names)
    respect_claim: Any = names["_respect_claim"]
    respect_claim(mine, device, 0.0, force=engine.handing_over)
    if mine._news_for_rollout:
        parking.effects.append(Acked(mine._claim, mine._claim_revision, parking.usable))
    return parking.effects, mine._handing_over


@cache
def _definition(source: str, name: str) -> CodeType:
    found: Any = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == name]
    return compile(ast.Module(found, []), "serving.py", "exec")
