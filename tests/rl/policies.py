"""A policy without an engine: says fixed words, at the border where the front door would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rose.rl.door import Sampling
from rose.rl.types import Said


class Scripted:
    def __init__(self, tokenizer: Any, say: Callable[[str], str], *, cut: bool = False) -> None:
        self._tokenizer = tokenizer
        self._say = say
        self._cut = cut
        """End turns by length, without an end-of-turn token."""
        self.asked: list[dict[str, Any]] = []

    async def generate(self, tokens: list[int], sampling: Sampling, **more: Any) -> Said:
        self.asked.append({"tokens": list(tokens), "sampling": sampling} | more)
        words = self._say(self._tokenizer.decode(tokens))
        made = self._tokenizer.encode(words, add_special_tokens=False)
        if not self._cut:
            made.append(more["stop"])
        return Said(made, [-0.5] * len(made), "length" if self._cut else "stop", (3,))
