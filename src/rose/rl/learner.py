"""One optimiser step from groups of episodes: GRPO, or DAPO.

Both compare episodes with others of the same task and follow what the policy would say now against
what the engine said when it sampled, clipped. The engine's own log-probs are the behaviour policy,
so a step of the trainer that engines have not seen yet, or numerics that differ, are corrected for
(importance sampling); how much there was to correct is among the facts, and a stale or corrupt
weight shows there at once.

    GRPO   advantage / spread of the group, mean over each episode's tokens, clip 0.2 both ways
    DAPO   the same advantage, mean over all tokens, clip 0.2 down and 0.28 up (clip-higher); the
           loop samples on until enough groups differ in reward (dynamic sampling)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import pvariance
from typing import Any, Literal

import torch
from torch import Tensor

from rose.rl.types import Group, Trajectory

Algorithm = Literal["grpo", "dapo"]
CLIP_DOWN = 0.2
CLIP_UP = {"grpo": 0.2, "dapo": 0.28}
SPREAD = 1e-4
"""Added to a group's spread, so that rewards that hardly differ are not blown up."""
MAX_GRAD_NORM = 1.0
MOST_TOKENS = 8192
"""Of a batch that is computed at once, padding included: bounds the trainer's memory."""
MOST_PADDED = 1.15
"""Tokens of a batch with its padding over those without: padding is computed like the rest."""
BATCHES = 4
"""Of each thread, at least: so that threads on cores that others use too end together."""


@dataclass(frozen=True)
class Learned:
    """What a step was like."""

    loss: float
    grad_norm: float
    """Before it was cut."""
    clipped: float
    """Share of tokens whose ratio was cut."""
    logp_difference_mean: float
    logp_difference_max: float
    """Between trainer and engine, of the same token: rounding if both have the same weights."""
    ratio_mean: float
    """Importance ratio before the first update."""
    entropy: float
    tokens: int
    """Of the model, that were learned from."""


@dataclass(frozen=True)
class _Batch:
    tokens: Tensor
    mask: Tensor
    """Of the tokens but the first: whether the model made them."""
    sampled: Tensor
    """Log-probs by the engine, of all but the first."""
    weights: Tensor
    """Of each token in the loss."""
    advantages: Tensor


def freeze(model: Any, layers: int) -> None:
    """All but the last layers, the last norm and the output."""
    decoder = model.get_decoder()
    if layers > len(decoder.layers):
        raise ValueError(f"train.layers is {layers}, the model has {len(decoder.layers)}")
    model.requires_grad_(False)
    for part in (*decoder.layers[-layers:], decoder.norm):
        part.requires_grad_(True)
    if not model.config.tie_word_embeddings:
        model.get_output_embeddings().requires_grad_(True)


def multiply_faster(model: Any) -> None:
    """float32 products by oneDNN instead of MKL, which is half as fast on CPUs that are not
    Intel's. torch takes it if asked for less precision, and without AMX it has none that is less
    precise."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and not torch.cpu._is_amx_tile_supported():
        torch.set_float32_matmul_precision("medium")


def advantages(rewards: Tensor) -> Tensor:
    """Of a group: against its mean, in its spread; 0 when all are alike."""
    return (rewards - rewards.mean()) / (rewards.std() + SPREAD)


def most_telling(group: Group, count: int) -> list[int]:
    """The episodes of a group whose rewards have the largest variance, `count` of them.

    Down-sampling of rollouts (PODS, arXiv 2504.13818): the best and the worst tell nearly all, at
    a fraction of the learner's time. The largest variance is always had by some from the top and
    the rest from the bottom.
    """
    if not count or count >= len(group.rewards):
        return list(range(len(group.rewards)))
    ranked = sorted(range(len(group.rewards)), key=lambda i: (group.rewards[i], i))
    ends = [ranked[:low] + ranked[len(ranked) - (count - low) :] for low in range(count, -1, -1)]
    return sorted(max(ends, key=lambda chosen: pvariance(group.rewards[i] for i in chosen)))


def log_probs(model: Any, tokens: Tensor, attended: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of the tokens that the model made, one after the other, and their entropies.

    Only their places go through the output layer: with a large vocabulary that is most of the cost.
    """
    hidden = model.get_decoder()(input_ids=tokens, attention_mask=attended).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, :-1][mask])
    spread = logits.float().log_softmax(-1)
    chosen = spread.gather(-1, tokens[:, 1:][mask][:, None]).squeeze(-1)
    with torch.no_grad():
        entropy = -(spread.exp() * spread).sum(-1)
    return chosen, entropy


class Learner:
    def __init__(
        self,
        model: Any,
        algorithm: Algorithm,
        *,
        learning_rate: float,
        minibatches: int = 1,
        layers: int = 0,
        learned: int = 0,
        threads: int = 1,
    ) -> None:
        """`layers`: learn only the last so many, and what follows them; 0 is all. `learned`: from
        so many episodes of each group, see `most_telling`. `threads`: each computes batches of its
        own. Threads that share a batch wait for the slowest after every operation, and one whose
        core serves as well is often late."""
        self.model = model
        multiply_faster(model)
        if layers:
            freeze(model, layers)
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimiser = torch.optim.AdamW(self._weights, lr=learning_rate, weight_decay=0.0)
        self._threads = threads
        self._algorithm = algorithm
        self._minibatches = minibatches
        self._learned = learned

    def learn(self, groups: list[Group]) -> Learned:
        """Groups whose episodes all got the same teach nothing: their gradient is exactly zero, and
        they are left out."""
        rows = [
            (episode, advantage)
            for group in groups
            if group.teaches
            for episode, advantage in self._compared(group)
        ]
        if not rows:
            return Learned(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0)
        self.model.train()
        facts = _Facts()
        for part in range(self._minibatches):
            chosen = rows[part :: self._minibatches]
            if chosen:
                self._update(chosen, facts, first=part == 0)
        return facts.summed()

    def _compared(self, group: Group) -> list[tuple[Trajectory, float]]:
        chosen = [group.trajectories[i] for i in most_telling(group, self._learned)]
        found = advantages(torch.tensor([one.reward for one in chosen]))
        return list(zip(chosen, found.tolist(), strict=True))

    def _update(self, rows: list[tuple[Trajectory, float]], facts: _Facts, *, first: bool) -> None:
        batches = _batches(rows, self._algorithm, self._threads)
        with ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads,
                                initargs=(1,)) as pool:  # fmt: skip
            computed = pool.map if self._threads > 1 else map
            for part in computed(self._gradients, batches):  # in order: sums do not depend on luck
                facts.add(part, first)
                for weight, gradient in zip(self._weights, part.gradients, strict=True):
                    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        norm = torch.nn.utils.clip_grad_norm_(self._weights, MAX_GRAD_NORM)
        facts.norms.append(float(norm))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def _gradients(self, batch: _Batch) -> _Part:
        attended = (batch.tokens >= 0).long()
        tokens = batch.tokens.clamp(min=0)
        found, entropy = log_probs(self.model, tokens, attended, batch.mask)
        difference = found - batch.sampled[batch.mask]
        ratio = difference.exp()
        cut = ratio.clamp(1 - CLIP_DOWN, 1 + CLIP_UP[self._algorithm])
        advantage = batch.advantages[batch.mask]
        gain = torch.minimum(ratio * advantage, cut * advantage)
        loss = -(gain * batch.weights[batch.mask]).sum()
        gradients = torch.autograd.grad(
            loss, self._weights, allow_unused=True, materialize_grads=True
        )
        clipped = ratio.detach() != cut.detach()
        return _Part(gradients, float(loss.detach()), difference.detach(), clipped, entropy)


@dataclass(frozen=True)
class _Part:
    """What came of a batch."""

    gradients: tuple[Tensor, ...]
    loss: float
    differences: Tensor
    clipped: Tensor
    entropies: Tensor


class _Facts:
    def __init__(self) -> None:
        self.norms: list[float] = []
        self._loss = 0.0
        self._differences: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._entropies: list[Tensor] = []

    def add(self, part: _Part, first: bool) -> None:
        self._loss += part.loss
        self._clipped.append(part.clipped.float())
        self._entropies.append(part.entropies)
        if first:  # later ones differ because the trainer has moved on
            self._differences.append(part.differences)

    def summed(self) -> Learned:
        differences = torch.cat(self._differences)
        return Learned(
            loss=self._loss,
            grad_norm=max(self.norms),
            clipped=float(torch.cat(self._clipped).mean()),
            logp_difference_mean=float(differences.abs().mean()),
            logp_difference_max=float(differences.abs().max()),
            ratio_mean=float(differences.exp().mean()),
            entropy=float(torch.cat(self._entropies).mean()),
            tokens=sum(len(part) for part in self._entropies),
        )


def _batches(
    rows: list[tuple[Trajectory, float]], algorithm: Algorithm, threads: int
) -> Iterator[_Batch]:
    """Episodes of like length together, so that little is padding; the longest first."""
    made = sum(episode.made for episode, _ in rows)
    whole = sum(len(episode.tokens) for episode, _ in rows)
    most = min(MOST_TOKENS, whole / (BATCHES * threads) if threads > 1 else math.inf)
    waiting: list[tuple[Trajectory, float]] = []
    filled = 0
    for row in sorted(rows, key=lambda row: len(row[0].tokens), reverse=True):
        longest, size = len((waiting or [row])[0][0].tokens), len(row[0].tokens)
        padded = longest * (len(waiting) + 1)
        if waiting and padded > min(most, MOST_PADDED * (filled + size)):
            yield _batch(waiting, made, len(rows), algorithm)
            waiting, filled = [], 0
        waiting.append(row)
        filled += size
    yield _batch(waiting, made, len(rows), algorithm)


def _batch(
    rows: list[tuple[Trajectory, float]], made: int, episodes: int, algorithm: Algorithm
) -> _Batch:
    length = max(len(episode.tokens) for episode, _ in rows)
    tokens = torch.full((len(rows), length), -1)
    mask = torch.zeros((len(rows), length - 1), dtype=torch.bool)
    sampled, weights = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for row, (episode, _) in enumerate(rows):
        size = len(episode.tokens)
        tokens[row, :size] = torch.tensor(episode.tokens)
        mask[row, : size - 1] = torch.tensor(episode.mask[1:], dtype=torch.bool)
        sampled[row, : size - 1] = torch.tensor(episode.logprobs[1:])
        weights[row] = 1 / (episodes * max(1, episode.made)) if algorithm == "grpo" else 1 / made
    values = torch.tensor([advantage for _, advantage in rows])[:, None].expand(mask.shape)
    return _Batch(tokens, mask, sampled, weights, values)
