"""Environments by name.

    frozen_lake     a grid to cross, as text
    tool_use        questions that take a table and a calculator
    long_tail       episodes and tools with the long tails of real agents
    gym:ID          any environment of gymnasium's registry whose words are text

An option is a field of the environment's class, or an argument of the gymnasium environment.
verifiers environments play their own episodes: see `rose.rl.environments.verifiers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rose.rl.environments import adapters
from rose.rl.environments.adapters import GymText
from rose.rl.environments.base import Environment
from rose.rl.environments.frozen_lake import FrozenLake
from rose.rl.environments.long_tail import LongTail
from rose.rl.environments.tool_use import ToolUse

__all__ = ["Environment", "FrozenLake", "GymText", "LongTail", "ToolUse", "check", "make"]

Own = FrozenLake | ToolUse | LongTail

ENVIRONMENTS: dict[str, type[Own]] = {
    "frozen_lake": FrozenLake,
    "tool_use": ToolUse,
    "long_tail": LongTail,
}
GYM = "gym:"


def make(name: str, **options: Any) -> Environment:
    """Raises ValueError if there is no such environment or option, or an option cannot be that."""
    if name.startswith(GYM):
        return adapters.make(name.removeprefix(GYM), options)
    if name not in ENVIRONMENTS:
        raise ValueError(
            f"there is no environment {name!r}: "
            f"there are {', '.join(ENVIRONMENTS)} and {GYM}ID for gymnasium's"
        )
    kind = ENVIRONMENTS[name]
    _check_options(name, kind, options)
    try:
        return kind(**options)
    except ValueError as error:
        raise ValueError(f"environment {name}: {error}") from error


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise what `make` would, as far as it is known without a gymnasium environment made."""
    if name.startswith(GYM):
        adapters.check(name.removeprefix(GYM), options)
    else:
        make(name, **options)


def _check_options(name: str, kind: type[Own], options: Mapping[str, Any]) -> None:
    known = {
        one.name: type(one.default)
        for one in fields(kind)
        if one.init and isinstance(one.default, int | float)
    }
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"environment {name} has no option {option}: it has {', '.join(known)}"
            )
        fits = isinstance(value, int | float if known[option] is float else int)
        if not fits or isinstance(value, bool):
            wanted = "a number" if known[option] is float else "a whole number"
            raise ValueError(f"option {option} of environment {name} is {value!r}, not {wanted}")
