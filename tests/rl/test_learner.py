"""Losses against their definitions, and learning what pays."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import pvariance
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rose.rl import learner
from rose.rl.learner import Learner, advantages, log_probs, most_telling, multiply_faster
from rose.rl.types import Group, Said, Trajectory


@pytest.fixture
def model(tiny_folder: Path) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def sampled(model: Any, prompt: list[int], made: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + made])).logits[0].log_softmax(-1)
    return [float(logits[len(prompt) + i - 1, token]) for i, token in enumerate(made)]


def episode(model: Any, made: list[int], reward: float, sample: int) -> Trajectory:
    """Two turns with an observation between them."""
    played = Trajectory(0, sample, reward=reward)
    played.hear([5, 6, 7])
    played.prompt = 3
    played.say(Said(made, sampled(model, played.tokens, made), "stop", (0,)))
    played.hear([9, 9])
    played.say(Said(made[:2], sampled(model, played.tokens, made[:2]), "stop", (0,)))
    return played


def group(model: Any, *rows: tuple[list[int], float]) -> Group:
    return Group(0, [episode(model, made, reward, i) for i, (made, reward) in enumerate(rows)])


def test_log_probs_are_the_engines_when_weights_are(model: Any) -> None:
    one = group(model, ([10, 11, 12], 1.0), ([20, 21], 0.0))
    learned = Learner(model, "grpo", learning_rate=1e-9).learn([one])
    assert learned.logp_difference_max < 1e-4
    assert learned.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert learned.tokens == 3 + 2 + 2 + 2


def test_a_corrupt_weight_shows_at_once(model: Any) -> None:
    one = group(model, ([10, 11, 12], 1.0), ([20, 21], 0.0))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    learned = Learner(model, "grpo", learning_rate=1e-9).learn([one])
    assert learned.logp_difference_mean > 0.01


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_the_gradient_is_the_definitions(model: Any, algorithm: Any, monkeypatch: Any) -> None:
    """Padded batches of any size give what one episode at a time gives."""
    one = group(model, ([10, 11, 12, 13, 14], 1.0), ([20, 21], 0.0), ([30, 31, 32], 0.5))
    given = advantages(torch.tensor(one.rewards))
    made = [played.made for played in one.trajectories]
    loss = torch.zeros(())
    for played, advantage in zip(one.trajectories, given, strict=True):
        tokens, mask = torch.tensor([played.tokens]), torch.tensor([played.mask[1:]]).bool()
        found, _ = log_probs(model, tokens, torch.ones_like(tokens), mask)
        each = found * advantage  # at a ratio of one the clipped objective has this gradient
        loss -= each.mean() / 3 if algorithm == "grpo" else each.sum() / sum(made)
    loss.backward()
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    norm = torch.sqrt(sum((g**2).sum() for g in wanted.values()))
    for most in (8192, 12):
        model.zero_grad()
        monkeypatch.setattr(learner, "MOST_TOKENS", most)
        taught = Learner(model, algorithm, learning_rate=0.0)
        kept: dict[str, Any] = {}
        monkeypatch.setattr(
            taught.optimiser,
            "step",
            lambda kept=kept: kept.update({n: w.grad.clone() for n, w in model.named_parameters()}),
        )
        taught.learn([one])
        scale = min(1.0, 1.0 / float(norm))
        for name, gradient in kept.items():
            assert torch.allclose(gradient, scale * wanted[name], atol=1e-5), name


def test_groups_that_are_all_alike_change_nothing(model: Any) -> None:
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    learned = Learner(model, "grpo", learning_rate=1.0).learn(
        [group(model, ([10, 11], 1.0), ([20, 21], 1.0))]
    )
    assert learned.tokens == 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_what_pays_becomes_likelier_and_clipping_stops_it(model: Any) -> None:
    one = group(model, ([10, 11, 12], 1.0), ([20, 21, 22], 0.0))
    taught = Learner(model, "dapo", learning_rate=3e-3)
    before = sampled(model, [5, 6, 7], [10, 11, 12])
    clipped = [taught.learn([one]).clipped for _ in range(6)]
    after = sampled(model, [5, 6, 7], [10, 11, 12])
    assert sum(after) > sum(before)
    assert clipped[0] == 0.0 < clipped[-1]


def test_only_the_last_layers_are_learned(model: Any) -> None:
    taught = Learner(model, "grpo", learning_rate=1e-2, layers=1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    taught.learn([group(model, ([10, 11], 1.0), ([20, 21], 0.0))])
    changed = {n for n, w in model.named_parameters() if not torch.equal(w, before[n])}
    assert changed
    assert not [n for n in changed if "layers.0." in n or "embed" in n]
    with pytest.raises(ValueError, match=r"train\.layers is 9"):
        Learner(model, "grpo", learning_rate=1.0, layers=9)


@pytest.mark.parametrize(
    ("rewards", "count", "chosen"),
    [
        ([0.0, 1.0, 0.0, 1.0], 2, [0, 3]),
        ([0.0, 0.0, 0.0, 1.0], 2, [0, 3]),
        ([0.2, 0.9, 0.5, 0.1], 2, [1, 3]),
        ([0.0, 0.0, 0.0, 1.0], 3, [0, 1, 3]),
        ([0.0, 1.0, 0.0, 1.0], 4, [0, 1, 2, 3]),
        ([0.0, 1.0], 0, [0, 1]),
        ([0.0, 1.0], 9, [0, 1]),
    ],
)
def test_the_most_telling_episodes_differ_most(
    rewards: list[float], count: int, chosen: list[int]
) -> None:
    made = Group(0, [Trajectory(0, i, reward=reward) for i, reward in enumerate(rewards)])
    assert most_telling(made, count) == chosen


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=7), st.integers(1, 7))
def test_no_other_choice_of_episodes_differs_more(rewards: list[float], count: int) -> None:
    made = Group(0, [Trajectory(0, i, reward=reward) for i, reward in enumerate(rewards)])
    chosen = most_telling(made, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(rewards))
    best = max(pvariance(some) for some in combinations(rewards, len(chosen)))
    assert pvariance([rewards[i] for i in chosen]) == pytest.approx(best, abs=1e-9)


def test_only_chosen_episodes_are_learned_from(model: Any) -> None:
    rows = [([10, 11, 12], 1.0), ([20, 21], 0.0), ([30, 31, 32, 33], 0.0)]
    few = Learner(model, "grpo", learning_rate=1e-9, learned=2).learn([group(model, *rows)])
    assert few.tokens == (3 + 2) + (2 + 2)


@given(st.lists(st.integers(2, 400), min_size=1, max_size=40))
def test_little_of_a_batch_is_padding_and_no_episode_is_lost(sizes: list[int]) -> None:
    rows = []
    for i, size in enumerate(sizes):
        played = Trajectory(0, i)
        played.hear([1] * size)
        rows.append((played, 0.0))
    found = []
    for batch in learner._batches(rows, "grpo", 1):
        real = (batch.tokens >= 0).sum(1).tolist()
        found += real
        assert batch.tokens.numel() <= max(learner.MOST_PADDED * sum(real), max(real))
    assert sorted(found) == sorted(sizes)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_threads_learn_the_same(tiny_folder: Path, algorithm: Any) -> None:
    found = []
    for threads in (1, 3):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
        made = [list(range(10, 12 + 3 * i)) for i in range(12)]
        groups = [group(model, *((m, float(i % 3)) for i, m in enumerate(made)))] * 2
        one = Learner(model, algorithm, learning_rate=1e-3, threads=threads)
        facts = [one.learn(groups) for _ in range(2)]
        found.append((facts, [w.detach().clone() for w in model.parameters()]))
    (facts, weights), (others, other_weights) = found
    assert facts[1].loss == pytest.approx(others[1].loss, abs=1e-5)
    assert facts[0].tokens == others[0].tokens
    assert facts[0].logp_difference_max == pytest.approx(others[0].logp_difference_max, abs=1e-5)
    for mine, theirs in zip(weights, other_weights, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_products_that_are_faster_are_as_precise() -> None:
    before = torch.get_float32_matmul_precision()
    torch.manual_seed(0)
    a, b = torch.randn(64, 512), torch.randn(512, 64)
    exact = a.double() @ b.double()
    try:
        multiply_faster(torch.nn.Linear(1, 1))
        assert (a @ b - exact).abs().max() < 1e-3  # bfloat16 would be off by 0.3
    finally:
        torch.set_float32_matmul_precision(before)
