"""What an environment is: three methods.

An environment is text in, text out. One object plays one episode at a time; agents make as many as
they have episodes in flight. `step` is a coroutine, so that a tool may take its time while other
episodes go on.
"""

from __future__ import annotations

from typing import Protocol

from rose.rl.types import Step


class Environment(Protocol):
    def reset(self, seed: int) -> str:
        """Begin an episode; the first observation. The same seed is the same task."""
        ...

    async def step(self, action: str) -> Step:
        """The model has said this."""
        ...

    def close(self) -> None:
        """The episode is over, or given up."""
        ...
