"""Real RL updates of a small model, and what each of them costs on the wire.

A policy-gradient loop in the manner of GRPO, on policy: every step samples a group of completions
for each of a few prompts, rewards them, and follows the log-probs of what was sampled, weighted
with the reward relative to the group. Master weights are float32, AdamW has a learning rate usual
in RL, and what is sent is bf16: so most elements do not change from one version to the next.
"""

from __future__ import annotations

import math
import random
import string
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose import models
from rose.bench.codecs import CODECS, wire_bytes
from rose.transfer.delta import Bits
from rose.transfer.layout import FRAME
from rose.transfer.weights import held

LEARNING_RATE = 1e-6
CLIP = 1.0
"""Norm to which gradients are cut."""
SAMPLES = 4
"""Completions of one prompt, a group."""
TOKENS = 24
"""Most tokens of a completion."""
PROMPTS = (
    "Counting up from {}:",
    "{} times 7 is",
    "The first multiples of {} are",
    "The number {} is",
)
"""All of them in every step, each time with another number."""
WIRE = "bfloat16"
SENT = ("rose", "coo", "xor_zstd")


@dataclass(frozen=True)
class Update:
    """The policy after an optimiser step; at step 0 as loaded, with nothing rewarded yet."""

    step: int
    reward_mean: float
    grad_norm: float
    """Before it was cut."""
    module: torch.nn.Module
    """The same object every time."""


@dataclass(frozen=True)
class Group:
    """Completions of one prompt and what they are worth."""

    tokens: torch.Tensor
    """A row each: the prompt, then the completion."""
    sampled: torch.Tensor
    """For every place of a completion: 1 up to its end, 0 after it."""
    rewards: torch.Tensor


def reward(completion: str) -> float:
    """The share of digits: easy to verify, and rarely the same for two samples."""
    return sum(c in string.digits for c in completion) / max(1, len(completion))


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards relative to their group's mean and spread; all 0 when they are all alike."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def sample(model: Any, tokenizer: Any, prompt: str) -> Group:
    asked = tokenizer.encode(prompt, return_tensors="pt")
    tokens = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=SAMPLES,
        max_new_tokens=TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    completions = tokens[:, asked.shape[1] :]
    ends = (completions == tokenizer.eos_token_id).long()
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = torch.tensor([reward(text) for text in texts])
    return Group(tokens, (ends.cumsum(1) - ends == 0).long(), rewards)


def loss(model: Any, group: Group) -> torch.Tensor:
    """Summed over the sampled tokens; its gradient is the policy gradient."""
    places = group.sampled.shape[1]
    logits = model(group.tokens, logits_to_keep=places + 1).logits[:, :-1]
    chosen = group.tokens[:, -places:, None]
    log_probs = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    return -(advantages(group.rewards)[:, None] * log_probs * group.sampled).sum()


def updates(
    model_folder: Path, steps: int, seed: int, say: Callable[[str], None]
) -> Iterator[Update]:
    """The policy as loaded, then after each of `steps` optimiser steps."""
    say(f"loading {model_folder}")
    torch.manual_seed(seed)
    numbers = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    yield Update(0, math.nan, math.nan, model)
    for step in range(1, steps + 1):
        prompts = [prompt.format(numbers.randint(2, 99)) for prompt in PROMPTS]
        groups = [sample(model, tokenizer, prompt) for prompt in prompts]
        tokens = sum(int(group.sampled.sum()) for group in groups)
        for group in groups:
            (loss(model, group) / tokens).backward()
        grad_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimiser.step()
        optimiser.zero_grad()
        reward_mean = float(torch.cat([group.rewards for group in groups]).mean())
        say(
            f"step {step} of {steps}: {tokens} tokens, reward {reward_mean:.3f}, "
            f"gradient norm {grad_norm:.2f}"
        )
        yield Update(step, reward_mean, grad_norm, model)


def measure(
    steps: int, seed: int, say: Callable[[str], None], model: str = "smollm2"
) -> dict[str, Any]:
    """What every update changes, and its size by codec in percent of the dense bytes."""
    versions = updates(models.resolve(model), steps, seed, say)
    snapshot = {
        one.tensor.name: np.concatenate([one.frame(index) for index in range(one.piece.frames)])
        for one in held(next(versions).module, WIRE)
    }
    elements = Counter[str]()
    for name, bits in snapshot.items():
        elements[kind(name)] += bits.size
    dense = sum(bits.nbytes for bits in snapshot.values())
    changed = Counter[str]()
    rows: list[dict[str, Any]] = []
    for update in versions:
        changed, sent, exact = follow(snapshot, update.module)
        density = changed.total() / elements.total()
        wire = {codec: 100 * sent[codec] / dense for codec in SENT}
        rows.append(
            {
                "step": update.step,
                "reward_mean": update.reward_mean,
                "grad_norm": update.grad_norm,
                "density": density,
                "wire_percent": wire,
                "bit_exact": exact,
            }
        )
        sizes = ", ".join(f"{codec} {share:.3f} %" for codec, share in wire.items())
        say(f"  {density:.3%} changed, on the wire {sizes}")
    return {
        "model": model,
        "elements": elements.total(),
        "learning_rate": LEARNING_RATE,
        "steps": rows,
        "density_by_kind": {name: changed[name] / elements[name] for name in elements},
    }


def follow(
    snapshot: dict[str, Bits], module: torch.nn.Module
) -> tuple[Counter[str], Counter[str], bool]:
    """Bring the snapshot to the module's weights by applying what rose sends, as a receiver does.

    Returns changed elements by kind of tensor, bytes by codec, and whether all bits are right.
    """
    changed, sent, exact = Counter[str](), Counter[str](), True
    for one in held(module, WIRE):
        name = one.tensor.name
        for index in range(one.piece.frames):
            old, new = snapshot[name][index * FRAME : (index + 1) * FRAME], one.frame(index)
            changed[kind(name)] += int(np.count_nonzero(old != new))
            payloads = {codec: CODECS[codec].encode(old, new) for codec in SENT}
            sent.update({codec: wire_bytes(payload) for codec, payload in payloads.items()})
            CODECS["rose"].apply(old, payloads["rose"])
            exact &= np.array_equal(old, new)
    return changed, sent, exact


def kind(tensor: str) -> str:
    """Of a tensor of a Llama, by its name."""
    if "embed" in tensor or "lm_head" in tensor:
        return "embedding"
    if "self_attn" in tensor:
        return "attention"
    return "mlp" if "mlp" in tensor else "norm"
