"""A dialogue as tokens. What the model said is never tokenised again.

Only what the environment says is tokenised, in the model's own chat template: the first prompt
whole, later observations as what the template puts between two turns of the model.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

FIRST, ANSWER = "a", "b"
"""Stand for what was said before; any words do."""


class Dialogue:
    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer of {tokenizer.name_or_path} has no chat template")
        self._tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id
        """What the model ends a turn with."""
        self._before = self._render([FIRST, ANSWER], asks=False)
        if self.end not in self._before:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} ends no turn with "
                f"{tokenizer.eos_token!r}, so it is unknown where a turn of the model ends"
            )
        last = len(self._before) - 1 - self._before[::-1].index(self.end)
        self._closing = self._before[last + 1 :]
        self.reply = lru_cache(maxsize=4096)(self._reply)

    def opening(self, text: str) -> list[int]:
        """The prompt of an episode."""
        return self._render([text], asks=True)

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _reply(self, text: str) -> tuple[int, ...]:
        """What comes between a turn of the model that has ended and its next one."""
        whole = self._render([FIRST, ANSWER, text], asks=True)
        if whole[: len(self._before)] != self._before:
            raise ValueError("the chat template writes earlier turns anew when later ones come")
        return (*self._closing, *whole[len(self._before) :])

    def _render(self, texts: list[str], *, asks: bool) -> list[int]:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        return list(
            self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=asks, tokenize=True, return_dict=False
            )
        )
