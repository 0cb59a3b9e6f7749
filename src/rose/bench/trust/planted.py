"""Holes that were once there, to be planted again: a simulation that does not find them proves
nothing. Each is an edit of the code that runs, in every place that was changed to close it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from rose.cluster import node, reporting
from rose.cluster.custody import Custody
from rose.cluster.memo import Memo
from rose.cluster.node import Node
from rose.executor import aside, borrower, gate, lender, page, processes, suspicion


class Edit(NamedTuple):
    """What stands in a function's source, and what stood there when the hole was open."""

    owner: Any
    function: str
    closed: str
    open: str


HOLES: dict[str, tuple[Edit, ...]] = {
    "S1 a restarted engine is warmed up on a device that was taken back": (
        Edit(Node, "_warm_up", "if not self.offered:", "if False:"),
        Edit(Custody, "order", "if state != LeaseState.DORMANT and not self.offered:", "if False:"),
        Edit(Custody, "orders", "offered=int(self.offered)", "offered=1"),
    ),
    "S1 a warm-up that fails leaves a device that was taken back active": (
        Edit(Node, "_warm_up", "if not self.offered:", "if False:"),
        Edit(Node, "_warm_up", "await self.revoke()", "pass"),
        Edit(Node, "activate", "await self.revoke()", "pass"),
        Edit(Custody, "order", "if state != LeaseState.DORMANT and not self.offered:", "if False:"),
        Edit(Custody, "orders", "offered=int(self.offered)", "offered=1"),
    ),
    "S2 serving that is not seen is taken for gone": (
        Edit(
            gate.Gate,
            "_window",
            "return admission.shut(Refusal.PAGE), None",
            "return admission.OPEN, None",
        ),
    ),
    "S2 facts are believed whatever their age": (
        Edit(page.Page, "lending", "not reading.facts.fresh(now)", "False"),
        Edit(gate.Gate, "granted", "now > window.until", "False"),
    ),
    "S2 who cannot be asked about is dead": (
        Edit(
            processes.Kernel,
            "_pidfd",
            "except OSError:\n        return None",
            "except OSError:\n        self._bury(writer)\n        return None",
        ),
    ),
    "S3 a record is written before the order": (
        Edit(
            Node,
            "take_back",
            "try:\n",
            "self._remember()\n    if self._memo.unwritten: raise OSError('disk full')\n    try:\n",
        ),
    ),
    "S4 a clean restart forgets that the device was taken back": (
        Edit(Memo, "_mark", "if before.exists():", "if False:"),
        Edit(Memo, "_mark", "elif not now.exists():", "elif False:"),
    ),
    "S4 to remember that the device was taken back needs room on the disk": (
        Edit(Memo, "_mark", "if before.exists():", "if before.exists() and offered:"),
    ),
    "S5 a need that cannot be read is none": (
        Edit(
            borrower.Borrower,
            "follow_memory",
            "unseen_s=0.0 if self._dedicated else now - self._seen_at",
            "unseen_s=0.0",
        ),
        Edit(
            suspicion.Suspicion,
            "stuck",
            "unseen = not dedicated and page.lending(lambda: now) is None",
            "unseen = False",
        ),
    ),
    "S6 a failure ends the second thread": (
        Edit(aside.Aside, "turn", "except Exception:", "except ZeroDivisionError:"),
    ),
    "S7 two serving engines are not noticed": (
        Edit(
            page.Page, "rival", "return not self._intruded() <= now - 2 * FACTS_S", "return False"
        ),
    ),
    "S7 two rollout engines may start": (Edit(page.Page, "own", "return False", "return True"),),
    "S8 nobody but the node takes memory back": (
        Edit(lender.Lender, "defend", "if why is None or suspect is None:", "if True:"),
    ),
    "S9 a window outlives the request that came": (
        Edit(
            gate.Gate,
            "_knows_all",
            "return decided.arrivals is None or decided.arrivals == self._page.arrivals()",
            "return True",
        ),
    ),
    "S10 a revocation is answered before the memory is back": (
        Edit(
            node,
            "carried_out",
            "holds = said.kv_claim or said.kv_resident or said.running or said.waiting",
            "holds = said.running or said.waiting",
        ),
        Edit(Node, "_hand_over", "while self.config.serving is not None and", "while False and"),
    ),
    "S11 an unexpected word ends the report loop": (
        Edit(
            reporting,
            "report",
            "except Exception as error:",
            "except (aiohttp.ClientError, OSError, TimeoutError) as error:",
        ),
    ),
}


@contextmanager
def planted(hole: str) -> Iterator[None]:
    """The code with the hole in it."""
    with ExitStack() as stack:
        edits = HOLES[hole]
        for owner, function in {(edit.owner, edit.function) for edit in edits}:
            here = [edit for edit in edits if (edit.owner, edit.function) == (owner, function)]
            stack.enter_context(_edited(owner, function, here))
        yield


@contextmanager
def _edited(owner: Any, function: str, edits: list[Edit]) -> Iterator[None]:
    sound = getattr(owner, function)
    source = textwrap.dedent(inspect.getsource(sound))
    for edit in edits:
        if source.count(edit.closed) != 1:
            raise LookupError(f"{function} has not exactly one {edit.closed!r}")
        source = source.replace(edit.closed, edit.open)
    names = dict(sound.__globals__)
    exec(source, names)
    setattr(owner, function, names[function])
    try:
        yield
    finally:
        setattr(owner, function, sound)
