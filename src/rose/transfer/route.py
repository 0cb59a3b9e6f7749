"""Which steps bring a copy to the newest version: a pure choice among those that a store has."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from rose.transfer.manifest import Step


def route(steps: Mapping[Step, int], have: int | None) -> list[Step]:
    """The cheapest way from the version at hand to the newest that can be reached.

    `steps` says what each costs (its bytes). A copy that is not among the versions of the store, or
    has none, starts with an anchor. Empty when there is nothing newer.
    """
    best: dict[int | None, tuple[int, Step | None]] = {have: (0, None), None: (0, None)}
    queue: list[tuple[int, int]] = []
    for start in (have, None):
        _reach(steps, start, 0, best, queue)
    while queue:
        cost, version = heapq.heappop(queue)
        if cost == best[version][0]:
            _reach(steps, version, cost, best, queue)
    newest = max((version for version in best if version is not None), default=None)
    if newest is None or (have is not None and newest <= have):
        return []
    way: list[Step] = []
    at: int | None = newest
    while (step := best[at][1]) is not None:
        way.insert(0, step)
        at = step.base
    return way


def _reach(
    steps: Mapping[Step, int],
    start: int | None,
    cost: int,
    best: dict[int | None, tuple[int, Step | None]],
    queue: list[tuple[int, int]],
) -> None:
    for step, price in steps.items():
        known = best.get(step.version)
        if step.base == start and (known is None or cost + price < known[0]):
            best[step.version] = (cost + price, step)
            heapq.heappush(queue, (cost + price, step.version))
