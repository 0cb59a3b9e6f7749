"""The warm start, cut short: it learns to copy what it sees and stays unsure where to go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.models import player
from rose.rl.dialogue import Dialogue


@pytest.mark.parametrize("wordy", [False, True])
def test_a_batch_is_episodes_with_what_the_script_said_marked(wordy: bool) -> None:
    tokenizer = player.byte_tokenizer(2048, player.TEMPLATE)
    tokens, mask = player._batch(tokenizer, random.Random(0), wordy)
    assert tokens.shape == mask.shape == (player.EPISODES, tokens.shape[1])
    said = tokenizer.decode(tokens[0][mask[0]], skip_special_tokens=True)
    heard = tokenizer.decode(tokens[0][~mask[0]], skip_special_tokens=True)
    assert said.count(">") == heard.count("L") == int((tokens[0] == tokenizer.eos_token_id).sum())
    assert heard[0] == "P"
    assert ("L edge D" in said) is wordy


def test_imitation_lowers_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(player, "STEPS", 50)
    monkeypatch.setattr(player, "EPISODES", 4)
    losses: list[float] = []
    with torch.random.fork_rng():
        folder = player.make_player(
            tmp_path / "tiny", lambda line: losses.append(float(line.rpartition(" ")[2]))
        )
    assert losses and losses[-1] < 1.5  # untaught it would be 5.6, the log of all bytes
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 1e5 < sum(w.numel() for w in model.parameters()) < 2e6
    dialogue = Dialogue(AutoTokenizer.from_pretrained(folder))
    assert dialogue.text(dialogue.opening("P.\n.G\n")) == "P.\n.G\n"
