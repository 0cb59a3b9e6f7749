from __future__ import annotations

from typing import Any

import pytest

from rose.rl.dialogue import Dialogue

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def test_the_parts_are_what_the_template_makes_of_the_whole(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    dialogue = Dialogue(tokenizer)
    said = [*tokenizer.encode("move", add_special_tokens=False), dialogue.end]
    built = dialogue.opening("hello") + said + list(dialogue.reply("next")) + said
    whole = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "move"},
        {"role": "user", "content": "next"},
        {"role": "assistant", "content": "move"},
    ]
    rendered = tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False)
    assert built == rendered[: len(built)]
    assert tokenizer.decode(rendered[len(built) :]) == "\n"
    assert dialogue.text(said) == "move"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "ends no turn"),
    ],
)
def test_what_has_no_turns_is_refused(tokenizer: Any, template: str | None, why: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=why):
        Dialogue(tokenizer)


def test_a_template_that_rewrites_what_was_said_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="anew"):
        Dialogue(tokenizer).reply("more")


@pytest.fixture(autouse=True)
def _restored(tokenizer: Any) -> Any:
    before = tokenizer.chat_template
    yield
    tokenizer.chat_template = before
