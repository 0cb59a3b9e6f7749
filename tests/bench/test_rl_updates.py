"""The loop is real RL on a tiny model, and its versions reach a subscriber bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rose.bench import rl_updates
from rose.bench.rl_updates import SAMPLES, SENT, advantages, kind, loss, measure, reward, updates
from rose.models import make_tiny
from rose.transfer import Publisher, Subscriber
from rose.transfer.delta import Bits
from rose.transfer.store.files import FileStore


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-a")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from more, and beside busy engines they wait for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wire(module: torch.nn.Module) -> dict[str, Bits]:
    return {
        name: value.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for name, value in module.named_parameters()
    }


def test_versions_reach_a_subscriber(tiny: Path, tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", "job")
    publisher, subscriber = Publisher(store), Subscriber(store, tmp_path / "copy")
    before: dict[str, Bits] = {}
    rewards = []
    for update in updates(tiny, 2, 0, lambda line: None):
        report = publisher.publish(update.module)
        assert subscriber.update() == update.step
        now = wire(update.module)
        assert subscriber.copy.arrays.keys() == now.keys()
        for name, bits in now.items():
            assert np.array_equal(subscriber.copy.arrays[name], bits), name
        if update.step:
            differ = sum(np.count_nonzero(before[name] != bits) for name, bits in now.items())
            assert 0 < differ <= report.changed < report.elements
            assert update.grad_norm > 0 and math.isfinite(update.grad_norm)
            rewards.append(update.reward_mean)
        before = now
    assert len(set(rewards)) == 2 and all(0 < mean < 1 for mean in rewards)


def test_measure_counts_what_changed(tiny: Path) -> None:
    said: list[str] = []
    found = measure(2, 0, said.append, model=str(tiny))
    assert [row["step"] for row in found["steps"]] == [1, 2]
    for row in found["steps"]:
        assert 0 < row["density"] < 1
        assert row["bit_exact"] and row["grad_norm"] > 0
        assert set(row["wire_percent"]) == set(SENT)
        assert row["wire_percent"]["coo"] == pytest.approx(300 * row["density"])
        assert all(0 < share < 100 for share in row["wire_percent"].values())
    assert set(found["density_by_kind"]) == {"embedding", "attention", "mlp", "norm"}
    assert all(0 <= density <= 1 for density in found["density_by_kind"].values())
    assert any("step 2 of 2" in line for line in said)


def test_the_same_seed_gives_the_same_updates(tiny: Path) -> None:
    one, other = ([u.reward_mean for u in updates(tiny, 1, 5, lambda line: None)] for _ in range(2))
    assert one[1] == other[1]


def test_following_the_loss_makes_rewarded_samples_likelier(tiny: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    group = rl_updates.sample(model, AutoTokenizer.from_pretrained(tiny), "Count.")
    assert len(group.tokens) == SAMPLES and group.rewards.std() > 0
    before = loss(model, group)
    before.backward()
    with torch.no_grad():
        for value in model.parameters():
            value -= 1e-4 * value.grad
        assert loss(model, group) < before


def test_a_completion_counts_up_to_its_end() -> None:
    class Talker:
        def generate(self, input_ids: torch.Tensor, **settings: object) -> torch.Tensor:
            said = torch.tensor([[7, 2, 2, 2], [2, 2, 2, 2], [7, 8, 9, 7], [7, 8, 9, 2]])
            return torch.cat((input_ids.expand(4, -1), said), 1)

    class Words:
        eos_token_id = pad_token_id = 2

        def encode(self, prompt: str, **settings: object) -> torch.Tensor:
            return torch.tensor([[5, 2]])

        def batch_decode(self, tokens: torch.Tensor, **settings: object) -> list[str]:
            return ["1" * int((row != 2).sum()) for row in tokens]

    group = rl_updates.sample(Talker(), Words(), "")
    assert group.sampled.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert group.rewards.tolist() == [1, 0, 1, 1]


def test_rewards_and_advantages() -> None:
    assert reward("") == reward("none") == 0
    assert reward("12, 3") == 0.6
    relative = advantages(torch.tensor([0.0, 0.5, 1.0]))
    assert relative.sum() == pytest.approx(0) and relative[0] < relative[1] < relative[2]
    assert advantages(torch.full((4,), 0.3)).abs().max() == pytest.approx(0, abs=1e-3)


def test_kinds_of_tensors() -> None:
    assert kind("model.embed_tokens.weight") == kind("lm_head.weight") == "embedding"
    assert kind("model.layers.0.self_attn.q_proj.weight") == "attention"
    assert kind("model.layers.0.mlp.down_proj.weight") == "mlp"
    assert kind("model.layers.0.post_attention_layernorm.weight") == kind("model.norm.weight")
    assert kind("model.norm.weight") == "norm"
