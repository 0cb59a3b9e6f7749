"""Bugs planted into real modules, for proofs that must find them."""

from __future__ import annotations

import inspect
import sys
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
    """The module with the bug in it, for everybody who looks things up there or has them."""
    before = dict(vars(module))
    others = {one: dict(vars(one)) for one in list(sys.modules.values()) if _is_ours(one, module)}
    try:
        source = edited(inspect.getsource(module), bug)
        exec(compile(source, module.__file__ or "", "exec"), vars(module))
        for one, names in others.items():
            for name, thing in names.items():
                if getattr(thing, "__module__", "") == module.__name__ and name in before:
                    setattr(one, name, vars(module)[name])
        yield
    finally:
        for one, names in {**others, module: before}.items():
            vars(one).clear()
            vars(one).update(names)


def _is_ours(one: ModuleType, but: ModuleType) -> bool:
    return one is not but and one.__name__.startswith("rose.executor")


def edited(source: str, bug: Bug) -> str:
    assert source.count(bug.sound) == 1, f"not there exactly once: {bug.sound}"
    return source.replace(bug.sound, bug.broken)
