"""Whose weights does an engine get? Pure.

Jobs of one source take turns on an engine; jobs with weights of their own cannot, so each source
has engines to itself, by its jobs' shares. An engine that has no owner goes to the source that has
least for its share, in tokens a second. Later one is handed over if turns of another source wait
and it still has less for its share afterwards than the owner had, or the owner has nothing to do.
Handing over means another model's weights: one engine at a time, with a pause (`MOVE_S`). Only a
source that has none does not have to wait, nor have turns: trainers bring their weights first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Where = tuple[str, str]
"""Store and job that versions are of."""
MOVE_S = 30.0


@dataclass(frozen=True)
class Claim:
    """Of all jobs of a source."""

    share: float = 1.0
    most_borrowed: int = 1 << 30
    waiting: int = 0
    """Turns."""
    running: int = 0


@dataclass(frozen=True)
class Shared:
    """An engine."""

    id: str
    owner: Where | None
    allowed: frozenset[Where]
    """Sources of the jobs that it may serve."""
    tokens_per_s: float = 1.0
    borrowed: bool = False
    turns: int = 0


def share_out(
    claims: Mapping[Where, Claim], engines: Sequence[Shared], *, may_move: bool
) -> dict[str, Where]:
    """Every engine's owner from now on; nobody's engine is left out."""
    owners = {e.id: e.owner for e in engines if e.owner in claims and e.owner in e.allowed}
    out = _Out(claims, engines, {id_: owner for id_, owner in owners.items() if owner is not None})
    free = [e for e in engines if e.id not in owners]
    for engine in sorted(free, key=lambda e: (-e.tokens_per_s, e.id)):
        takers = [where for where in claims if out.may_have(where, engine)]
        if takers:
            out.owners[engine.id] = min(takers, key=lambda w: (out.wealth(w), w))
    if (move := out.fairest_move(may_move)) is not None:
        engine, where = move
        out.owners[engine.id] = where
    return out.owners


class _Out:
    """Who has what, while it is given out."""

    def __init__(
        self, claims: Mapping[Where, Claim], engines: Sequence[Shared], owners: dict[str, Where]
    ) -> None:
        self._claims = claims
        self._engines = engines
        self.owners = owners

    def wealth(self, where: Where, more: float = 0.0) -> float:
        """Tokens a second for a share of one."""
        return (sum(e.tokens_per_s for e in self._of(where)) + more) / self._claims[where].share

    def may_have(self, where: Where, engine: Shared) -> bool:
        borrowed = sum(e.borrowed for e in self._of(where))
        room = not engine.borrowed or borrowed < self._claims[where].most_borrowed
        return where in engine.allowed and room

    def fairest_move(self, may_move: bool) -> tuple[Shared, Where] | None:
        wanting = [
            where
            for where, claim in self._claims.items()
            if (claim.waiting and may_move) or not self._of(where)
        ]
        for where in sorted(wanting, key=lambda w: (self.wealth(w), w)):
            found = [e for e in self._engines if e.id in self.owners and self._fair(e, where)]
            if found:
                return min(found, key=lambda e: (e.turns, e.tokens_per_s, e.id)), where
        return None

    def _fair(self, engine: Shared, where: Where) -> bool:
        owner = self.owners[engine.id]
        if owner == where or not self.may_have(where, engine):
            return False
        theirs = self._claims[owner]
        rests = not theirs.waiting and not theirs.running and self._claims[where].waiting
        return bool(rests) or self.wealth(where, engine.tokens_per_s) < self.wealth(owner)

    def _of(self, where: Where) -> list[Shared]:
        return [e for e in self._engines if self.owners.get(e.id) == where]
