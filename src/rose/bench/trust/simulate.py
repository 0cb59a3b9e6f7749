"""Many histories on all cores: what is broken, and whether planted holes are found."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from rose.bench.trust import history
from rose.bench.trust.history import Outcome
from rose.bench.trust.planted import HOLES, planted

TOLD_EVERY = 100


@contextmanager
def workers(jobs: int | None = None) -> Iterator[Executor]:
    """One process a core, at low priority: nobody waits for a simulation."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        jobs or len(os.sched_getaffinity(0)), mp_context=context, initializer=os.nice, initargs=(5,)
    ) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def outcomes(
    pool: Executor, seeds: Iterable[int], say: Callable[[str], None] = lambda _: None
) -> Iterator[Outcome]:
    for number, outcome in enumerate(pool.map(history.run, seeds, chunksize=8), 1):
        for promise, what in outcome.broken.items():
            faults = ", ".join(outcome.faults)
            say(f"  BROKEN, seed {outcome.seed}: {promise} ({what}); faults: {faults}")
        if number % TOLD_EVERY == 0:
            say(f"  {number} histories")
        yield outcome


def first_found(hole: str, seeds: int) -> int | None:
    """The first seed in whose history a promise breaks with the hole planted."""
    with planted(hole):
        return next((seed for seed in range(seeds) if history.run(seed).broken), None)


def found(pool: Executor, seeds: int) -> dict[str, int | None]:
    """Of every hole the first seed that finds it."""
    tries: dict[str, Any] = {hole: pool.submit(first_found, hole, seeds) for hole in HOLES}
    return {hole: try_.result() for hole, try_ in tries.items()}
