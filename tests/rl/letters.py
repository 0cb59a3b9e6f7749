"""A game that a random model can get better at: say many of one letter. For `gym:` by its id."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Letters(gymnasium.Env[str, str]):
    """`turns` turns; each pays the share of small letters in what was said."""

    observation_space = Text(64, charset=LETTERS + " ")
    action_space = Text(4096, min_length=0)

    def __init__(self, turns: int = 2) -> None:
        self._turns = turns

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = self._turns
        return f"begin {LETTERS[(seed or 0) % 26]}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        share = sum(c in LETTERS for c in action) / max(1, len(action))
        return "go on", share / self._turns, self._left == 0, False, {}


gymnasium.register(id="rose/Letters-v0", entry_point=Letters)
