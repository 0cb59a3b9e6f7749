"""TRL's trainers, unmodified, through the front door to a real vLLM engine, on CPU.

What they are judged by is what TRL itself reports: by how much the engine's log-prob of a sampled
token differs from the trainer's own. With the same float32 weights on both sides that is rounding.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.scheduler.conftest import Process, call

from rose import models
from rose.rl.trl import (
    Publishing,
    WeightTransfer,
    environment_reward,
    publish_weights,
    rollout_func,
)
from rose.rl.types import Said, Trajectory
from rose.rl.weight_sync import WeightSync
from rose.transfer.errors import TransferError
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Server

DIFFERENCE = "sampling/sampling_logp_difference"
RATIO = "sampling/importance_sampling_ratio/mean"
ROUNDING = 1e-4
"""Above any difference seen between vLLM's and transformers' float32."""
PROMPTS = ["to be, or not", "once upon a", "it was the best", "call me"]
TURN, OBSERVATION = 10, [70, 71, 72, 73, 74]
SHARD = "model.layers.0.mlp.down_proj.weight"
"""One that matters for every token."""


@pytest.fixture(scope="module")
def weights(rose_home: Path) -> dict[str, torch.Tensor]:
    return load_file(next(models.resolve("tiny-b").glob("*.safetensors")))


@pytest.fixture
def where(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A store that the trainer writes to as files and engines read over TCP."""
    server = Server(lambda job: FileStore(tmp_path / "store", job))
    yield {
        "store": f"file://{tmp_path / 'store'}",
        "job": "trl",
        "folder": str(tmp_path / "copy"),
        "engines_from": f"tcp://127.0.0.1:{server.address[1]}",
        "wire": "float32",
    }
    server.close()


@pytest.fixture
def publishing(
    door: Process, where: dict[str, Any], weights: dict[str, torch.Tensor]
) -> Iterator[Publishing]:
    """The engine has its own weights again afterwards."""
    with publish_weights(**where) as made:
        yield made
        if made.last is not None:
            made.sync.send(weights.items())


@pytest.fixture
def sync(
    door: Process, where: dict[str, Any], weights: dict[str, torch.Tensor]
) -> Iterator[WeightSync]:
    made = WeightSync(**where)
    made.open(door.url)
    yield made
    made.send(weights.items())
    made.close()


def even(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that groups differ in and that can be learned."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer(door: Process, folder: Path, steps: int, reward: Any, **more: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(folder / "out"),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=door.url,
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=str(models.resolve("tiny-b")),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        **more,
    )


def steps_of(trained: Any) -> list[dict[str, float]]:
    return [entry for entry in trained.state.log_history if f"{DIFFERENCE}/mean" in entry]


def generate(door: Process, tokens: list[int], most: int, **sampling: Any) -> Any:
    params = {"max_tokens": most, "logprobs": 1, "ignore_eos": True, "temperature": 1.0}
    body = {"token_ids": tokens, "sampling_params": params | sampling}
    status, found = call(f"{door.url}/inference/v1/generate", body)
    assert status == 200, found
    return found["choices"][0]


def say(door: Process, tokens: list[int], most: int) -> Said:
    choice = generate(door, tokens, most)
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Said(choice["token_ids"], found, choice["finish_reason"])


def log_probs(model: Any, tokens: list[int], prompt: int) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[prompt:])[:, None]).squeeze(1)


def off(door: Process, model: Any) -> float:
    """By how much the engine's log-probs are not those of a model."""
    prompt = [9, 8, 7, 6, 5]
    said = say(door, prompt, 24)
    own = log_probs(model, prompt + said.tokens, len(prompt))
    return float((own - torch.tensor(said.logprobs)).abs().max())


def plain_model(weights: dict[str, torch.Tensor]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models.resolve("tiny-b"), dtype=torch.float32)
    model.load_state_dict(weights)
    return model.eval()


def shaken(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value + 0.02 * torch.randn(value.shape) for name, value in weights.items()}


def test_grpo_trains_and_the_engine_follows(
    door: Process, publishing: Publishing, tmp_path: Path
) -> None:
    from transformers import TrainerCallback

    seen: list[tuple[str, int]] = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert publishing.last is not None
            version = call(f"{door.url}/weight_info")[1]["weight_version"]
            seen.append((version, publishing.last.changed))

    trained = trainer(door, tmp_path, 3, even, callbacks=[Look()])
    trained.train()
    steps = steps_of(trained)
    assert len(steps) == 3
    assert [version for version, _ in seen] == ["0", "1", "2"]
    assert all(changed > 0 for _, changed in seen)
    for step in steps:
        assert step[f"{DIFFERENCE}/max"] < ROUNDING, step
        assert step[RATIO] == pytest.approx(1.0, abs=1e-3)
        assert step["reward_std"] > 0


def test_a_stale_or_corrupt_shard_shows_at_once(
    door: Process,
    publishing: Publishing,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At step 1 the engine has one tensor from before the first update, at step 3 one in which a
    hundredth of the elements is wrong; TRL's own sync before the next step heals it."""
    trained = trainer(door, tmp_path, 5, even)
    own_sync = trained.vllm_generation.sync_weights

    def spoil() -> None:
        own_sync()
        wrong = {name: value.detach().clone() for name, value in trained.model.named_parameters()}
        if trained.state.global_step == 1:
            wrong[SHARD] = weights[SHARD]
        elif trained.state.global_step == 3:
            wrong[SHARD].view(-1)[::100] = 1.0
        else:
            return
        publishing.sync.send(wrong.items())

    monkeypatch.setattr(trained.vllm_generation, "sync_weights", spoil)
    trained.train()
    means = [step[f"{DIFFERENCE}/mean"] for step in steps_of(trained)]
    right, stale, corrupt = max(means[0], means[2], means[4]), means[1], means[3]
    assert right < ROUNDING, means
    assert stale > 100 * right, means
    assert corrupt > 1000 * right, means


def test_episodes_of_several_turns(door: Process, publishing: Publishing, tmp_path: Path) -> None:
    episodes: list[list[Trajectory]] = []

    def play(prompts: list[str], at: Any) -> list[Trajectory]:
        episodes.append([two_turns(door, at, i, text) for i, text in enumerate(prompts)])
        return episodes[-1]

    trained = trainer(door, tmp_path, 2, environment_reward, rollout_func=rollout_func(play))
    trained.train()
    steps = steps_of(trained)
    assert [len(played) for played in episodes] == [8, 8]
    for step, played in zip(steps, episodes, strict=True):
        assert step[f"{DIFFERENCE}/max"] < ROUNDING, step
        assert step[RATIO] == pytest.approx(1.0, abs=1e-3)
        rewards = [one.reward for one in played]
        assert step["rewards/environment_reward/mean"] == pytest.approx(sum(rewards) / 8)
        assert step["completions/mean_length"] == 2 * TURN  # what the model made, nothing else
    assert publishing.last is not None
    assert publishing.last.step.version == 1


def two_turns(door: Process, at: Any, sample: int, text: str) -> Trajectory:
    played = Trajectory(task=0, sample=sample)
    played.hear(at.processing_class(text)["input_ids"])
    played.prompt = len(played.tokens)
    played.say(say(door, played.tokens, TURN))
    played.hear(OBSERVATION)
    played.say(say(door, played.tokens, TURN))
    made = [token for token, mine in zip(played.tokens, played.mask, strict=True) if mine]
    played.reward = sum(token % 2 == 0 for token in made) / len(made)
    return played


def test_episodes_as_trl_takes_them() -> None:
    talks, silent = Trajectory(task=1, sample=0, reward=0.5), Trajectory(task=1, sample=1)
    for one in (talks, silent):
        one.hear([1, 2, 3])
        one.prompt = 3
    talks.say(Said([4, 5], [-0.1, -0.2], "stop"))
    talks.hear([6])
    talks.say(Said([7], [-0.3], "stop"))
    columns = rollout_func(lambda prompts, at: [talks, silent])(["a", "a"], None)
    assert columns == {
        "prompt_ids": [[1, 2, 3], [1, 2]],
        "completion_ids": [[4, 5, 6, 7], [3]],
        "logprobs": [[-0.1, -0.2, 0.0, -0.3], [0.0]],
        "env_mask": [[1, 1, 0, 1], [0]],
        "reward": [0.5, 0.0],
    }
    with pytest.raises(ValueError, match="2 episodes were played for 3 prompts"):
        rollout_func(lambda prompts, at: [talks, silent])(["a", "a", "a"], None)


def test_a_failed_update_says_why_and_is_not_left_begun(
    door: Process, where: dict[str, Any], sync: WeightSync, weights: dict[str, torch.Tensor]
) -> None:
    wrong = WeightSync(**where | {"job": "wrong", "patience_s": 0.5})
    wrong.open(door.url)
    with pytest.raises(TransferError, match=r"update_weights.* cannot be committed"):
        wrong.send([("lm_head.weight", torch.zeros(3, 5))])
    assert call(f"{door.url}/start_weight_update", {})[0] == 200, "an update was left begun"
    wrong.close()
    # Now one is, as of a trainer that died: that must not stop the next.
    sync.open(door.url)
    sync.send(weights.items())
    assert off(door, plain_model(weights)) < ROUNDING


def test_versions_go_on_from_what_the_store_has(
    door: Process, where: dict[str, Any], sync: WeightSync, weights: dict[str, torch.Tensor]
) -> None:
    sync.send(weights.items())
    assert sync.send(shaken(weights, 1).items()).step.version == 1
    sync.close()
    with pytest.raises(TransferError, match="closed"):
        sync.send(weights.items())
    sync.open(door.url)
    report = sync.send(shaken(weights, 2).items())
    assert (report.step.base, report.step.version) == (1, 2)


def test_a_scheduler_that_is_started_again_is_told_again(
    door: Process, sync: WeightSync, weights: dict[str, torch.Tensor]
) -> None:
    sync.send(weights.items())
    door.end()
    back = threading.Timer(1.0, door.start)
    back.start()
    changed = shaken(weights, 4)
    sync.send(changed.items())
    back.join()
    assert off(door, plain_model(changed)) < ROUNDING
    (engine,) = call(f"{door.url}/rose/v1/status")[1]["engines"]
    assert engine["version"] == "1"


def test_weight_transfer_while_a_turn_is_in_flight(
    door: Process, where: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    """As `AsyncGRPOTrainer` calls it; the turn goes on with tokens of both versions."""
    transfer, found = WeightTransfer(door.url, **where), queue.Queue[Any]()

    def send(state: dict[str, torch.Tensor]) -> None:
        transfer.pause()
        transfer.send_weights(iter(state.items()))
        transfer.resume()

    transfer.init_weight_transfer()
    send(weights)
    turn = threading.Thread(target=lambda: found.put(generate(door, [9, 8, 7, 6], 500)))
    turn.start()
    try:
        changed = shaken(weights, 3)
        send(changed)
        assert off(door, plain_model(changed)) < ROUNDING
    finally:
        turn.join()
        send(weights)
        transfer.destroy()
    choice = found.get_nowait()
    assert len(choice["token_ids"]) == 500
    assert [span["version"] for span in choice["weight_versions"]] == ["0", "1"]


class Worker:
    """TRL's `RolloutWorkerProtocol`, without its process: new samples when there is a new policy,
    two batches of them, as the trainer's loader looks one ahead."""

    def __init__(self, door: Process) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self._door = door
        self._group = 0

    def update_model_version(self, model_version: int) -> None:
        for _ in range(2):
            for advantage in (1.0, -1.0, 0.5, -0.5):
                self.rollout_buffer.put(self._sample(model_version, advantage))
            self._group += 1

    def _sample(self, version: int, advantage: float) -> Any:
        import numpy as np

        prompt = [9, 8, 7, 6, 5]
        said = say(self._door, prompt, 16)
        unsaid = [0] * len(prompt)
        return SimpleNamespace(
            prompt=[],
            completion=[],
            input_ids=np.array(prompt + said.tokens),
            completion_mask=np.array(unsaid + [1] * len(said.tokens)),
            old_log_probs=np.array(unsaid + said.logprobs, np.float32),
            advantage=advantage,
            model_version=version,
            group_id=self._group,
            metrics={"reward": advantage},
            enqueued_at=None,
        )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    *_: Any,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """What TRL's kernel does: each segment sees its path, up to itself."""
    made = []
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]].transpose(0, 1)
        k, v = (x[ends_k[i] : ends_k[i + 1]].transpose(0, 1) for x in (key, value))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        made.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(made)


@pytest.fixture
def async_trl(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`AsyncGRPOTrainer` wants CUDA twice, for its attention kernel and for the device's name;
    nothing else of it is replaced."""
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernel = SimpleNamespace(flash_attn_varlen_func=plain_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)

    def make(door: Process, folder: Path, transfer: WeightTransfer) -> Any:
        from datasets import Dataset

        config = async_grpo.AsyncGRPOConfig(
            output_dir=str(folder / "out"),
            vllm_server_base_url=door.url,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            token_budget=0,
            learning_rate=1e-3,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        return async_grpo.AsyncGRPOTrainer(
            model=str(models.resolve("tiny-b")),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            rollout_worker=Worker(door),
            weight_transfer=transfer,
        )

    return make


def test_async_grpo_trains_and_the_engine_follows(
    door: Process,
    where: dict[str, Any],
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    async_trl: Callable[..., Any],
) -> None:
    """With an attention of ours in place of its CUDA kernel, see `async_trl`, and a rollout worker
    in this process; `WeightTransfer` is used by TRL's own loop."""
    transfer = WeightTransfer(door.url, **where)
    trained = async_trl(door, tmp_path, transfer)
    try:
        trained.train()
        steps = [entry for entry in trained.state.log_history if "ratio" in entry]
        assert len(steps) == 2
        assert steps[0]["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert call(f"{door.url}/weight_info")[1]["weight_version"] == "2"
        own = {name: value.detach() for name, value in trained.model.named_parameters()}
        assert not torch.equal(own[SHARD], weights[SHARD])
        assert off(door, plain_model(own)) < ROUNDING
    finally:
        transfer.init_weight_transfer()
        transfer.send_weights(iter(weights.items()))
        transfer.destroy()
