"""Work done by threads that are a few pieces ahead, its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_order(work: Iterable[Callable[[], T]], threads: int, ahead: int, name: str) -> Iterator[T]:
    """At most `ahead` results wait to be taken; who stops taking them cancels the rest. One thread
    is the caller's own: handing over would only cost."""
    if threads == 1:
        yield from (piece() for piece in work)
        return
    with ThreadPoolExecutor(threads, name) as pool:
        going: deque[Future[T]] = deque()
        try:
            for piece in work:
                going.append(pool.submit(piece))
                if len(going) >= ahead:
                    yield going.popleft().result()
            while going:
                yield going.popleft().result()
        finally:
            for future in going:
                future.cancel()
