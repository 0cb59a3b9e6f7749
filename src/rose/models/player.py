"""A small Llama that has learned to play FrozenLake badly, made on this machine in a minute.

It imitates a scripted player who names the cells around him and then mostly moves at random, so it
knows the rules of the dialogue and reaches the goal in about a third of the maps: what RL needs to
have something to improve. It has the byte-level tokenizer of the other tiny models, and a chat
template that says nothing of its own: what the environment says, what the model says, an end.

A wordy player says what it sees in words: nearly three times the tokens a turn, for benchmarks in
which engines and not turns are what costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.models.folder import build, is_complete
from rose.models.tiny import byte_tokenizer, llama

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
HIDDEN, LAYERS, INTERMEDIATE = 128, 2, 384
"""0.5 M parameters: a step of a few milliseconds."""
SKILL = 0.38
"""Share of moves that the script makes well: then about a third of the episodes reach the goal."""
STEPS, EPISODES, LEARNING_RATE = 200, 12, 4e-3
SEED = 0
Say = Callable[[str], None]


def make_player(path: Path, say: Say = lambda _: None, *, wordy: bool = False) -> Path:
    """Write the model to the folder `path`, unless a complete model is already there."""
    if is_complete(path):
        return path
    import torch

    tokenizer = byte_tokenizer(2048, TEMPLATE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = llama(tokenizer, HIDDEN, LAYERS, 2, INTERMEDIATE, std=0.02)
        imitate(model, tokenizer, say, wordy)
    with build(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return path


def imitate(model: Any, tokenizer: Any, say: Say, wordy: bool) -> None:
    """Learn what the script says, given all that was said before."""
    import torch
    from torch.nn.functional import cross_entropy

    rng = random.Random(SEED)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, LEARNING_RATE, total_steps=STEPS, pct_start=0.1
    )
    model.train()
    for step in range(STEPS):
        tokens, mask = _batch(tokenizer, rng, wordy)
        logits = model(tokens[:, :-1]).logits
        loss = cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        schedule.step()
        if (step + 1) % 50 == 0:
            say(f"warm start {step + 1} of {STEPS}: loss {float(loss.detach()):.3f}")


def _batch(tokenizer: Any, rng: random.Random, wordy: bool) -> tuple[Tensor, Tensor]:
    """Episodes of the script, padded at their end; the mask is of what the script said."""
    import torch

    from rose.rl.environments.frozen_lake import FrozenLake
    from rose.rl.environments.frozen_lake_script import play

    rows: list[tuple[list[int], list[bool]]] = []
    for _ in range(EPISODES):
        tokens: list[int] = []
        mask: list[bool] = []
        seed = rng.randrange(1 << 30)
        for seen, said in play(seed, SKILL, rng, FrozenLake(), wordy=wordy):
            heard = tokenizer.encode(seen, add_special_tokens=False)
            spoken = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
            tokens += heard + spoken
            mask += [False] * len(heard) + [True] * len(spoken)
        rows.append((tokens, mask))
    length = max(len(tokens) for tokens, _ in rows)
    padded = torch.full((len(rows), length), tokenizer.pad_token_id)
    masks = torch.zeros((len(rows), length), dtype=torch.bool)
    for row, (tokens, mask) in enumerate(rows):
        padded[row, : len(tokens)] = torch.tensor(tokens)
        masks[row, : len(mask)] = torch.tensor(mask)
    return padded, masks
