"""How far long work is: a part of it begins with a name, and tells its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Progress = Callable[[float], None]
"""Takes the share of a part that is done."""
Say = Callable[[str], Progress]
"""Begins the next part."""


def quiet(_: str) -> Progress:
    return lambda _: None


def tracked(count: int, progress: Progress) -> Iterator[int]:
    """Numbers up to a count, each telling when its work is done."""
    for number in range(count):
        yield number
        progress((number + 1) / count)
