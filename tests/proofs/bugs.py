"""Bugs planted into real modules, for proofs that must find them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple


class Bug(NamedTuple):
    """A piece of a module's source, and what stands there instead."""

    sound: str
    broken: str


@contextmanager
def planted(module: ModuleType, bug: Bug) -> Iterator[None]:
    """The module with the bug in it, for everybody who looks things up there."""
    before = dict(vars(module))
    try:
        source = edited(inspect.getsource(module), bug)
        exec(compile(source, module.__file__ or "", "exec"), vars(module))
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


def edited(source: str, bug: Bug) -> str:
    assert source.count(bug.sound) == 1, f"not there exactly once: {bug.sound}"
    return source.replace(bug.sound, bug.broken)
