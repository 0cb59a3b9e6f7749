"""How far long work is: a part of it begins with a name, and tells its share."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]
"""Takes the share of a part that is done."""
Say = Callable[[str], Progress]
"""Begins the next part."""


def quiet(_: str) -> Progress:
    return lambda _: None
