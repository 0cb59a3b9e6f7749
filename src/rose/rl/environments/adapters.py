"""gymnasium environments as text environments.

What is text already (a `Text` space) goes through as it is. For all else the user says how an
observation is shown and how an action is read; an action that cannot be read (`parse` raises
ValueError) is answered with that error's words, and the environment does not get to know of it.
Environments compute in the event loop: one that takes long holds up all other episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.spaces import Text

from rose.rl.types import Step

Parse = Callable[[str], Any]
Show = Callable[[Any], str]

OURS = ("parse", "show")
OF_MAKE = ("max_episode_steps", "disable_env_checker")
"""Options that `gymnasium.make` itself has for every environment."""


class GymText:
    """`make` makes the environment, anew for episodes after one that was closed."""

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        parse: Parse | None = None,
        show: Show | None = None,
    ) -> None:
        self._make = make
        self._env: gymnasium.Env[Any, Any] | None = make()
        for name, given, space in (
            ("show", show, self._env.observation_space),
            ("parse", parse, self._env.action_space),
        ):
            if given is None and not isinstance(space, Text):
                self._env.close()
                raise ValueError(f"{space} of {self._env} is not text: give {name}")
        self._parse: Parse = parse or str
        self._show: Show = show or str

    def reset(self, seed: int) -> str:
        if self._env is None:
            self._env = self._make()
        observation, _ = self._env.reset(seed=seed)
        return self._show(observation)

    async def step(self, action: str) -> Step:
        if self._env is None:
            raise RuntimeError("no episode is being played: reset comes first")
        try:
            read = self._parse(action)
        except ValueError as error:
            return Step(str(error))
        observation, reward, terminated, truncated, _ = self._env.step(read)
        return Step(self._show(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def make(id_: str, options: Mapping[str, Any]) -> GymText:
    """Of gymnasium's registry; `MODULE:ID` imports the module that registers it."""
    check(id_, options)
    others = {name: value for name, value in options.items() if name not in OURS}
    return GymText(
        partial(gymnasium.make, id_, **others), options.get("parse"), options.get("show")
    )


def check(id_: str, options: Mapping[str, Any]) -> None:
    known = _parameters(_spec(id_))
    if known is None:
        return
    for name in options:
        if name not in (*OURS, *OF_MAKE, *known):
            raise ValueError(
                f"environment gym:{id_} has no option {name}: "
                f"it has {', '.join([*OURS, *OF_MAKE, *known])}"
            )


def _spec(id_: str) -> EnvSpec:
    module, _, name = id_.rpartition(":")
    try:
        if module:
            import_module(module)
        return gymnasium.spec(name)
    except (ModuleNotFoundError, gymnasium.error.Error) as error:
        raise ValueError(f"there is no environment gym:{id_}: {error}") from error


def _parameters(spec: EnvSpec) -> list[str] | None:
    """Names that the environment's maker takes; None if it takes any."""
    entry = spec.entry_point
    maker = load_env_creator(entry) if isinstance(entry, str) else entry
    if maker is None:
        return None
    found = signature(maker).parameters.values()
    if any(one.kind == Parameter.VAR_KEYWORD for one in found):
        return None
    return [one.name for one in found]
