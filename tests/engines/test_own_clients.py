"""TRL's and verifiers' own clients, as they are, through the front door to a real vLLM engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from tests.scheduler.conftest import Process, call

from rose import models
from rose.transfer import Publisher
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Server

PROMPTS = [[9, 8, 7, 6, 5], [40, 41, 42]]


@pytest.fixture
def trl(door: Process) -> Any:
    from trl.generation.vllm_client import VLLMClient

    return VLLMClient(base_url=door.url, connection_timeout=120.0)


@pytest.fixture
def trl_past_the_door(active_node: Any) -> Any:
    from trl.generation.vllm_client import VLLMClient

    return VLLMClient(base_url=active_node.rollout_url, connection_timeout=120.0)


GREEDY = {"temperature": 0.0, "max_tokens": 10, "generation_kwargs": {"ignore_eos": True}}


def same(ours: dict[str, Any], its: dict[str, Any]) -> None:
    for name in ("prompt_ids", "completion_ids", "logprob_token_ids"):
        assert ours[name] == its[name], name
    for mine, other in zip(ours["logprobs"], its["logprobs"], strict=True):
        assert [p for (p, *_) in mine] == pytest.approx([p for (p, *_) in other], abs=1e-3)


def test_trl_generates_as_with_a_single_server(trl: Any, trl_past_the_door: Any) -> None:
    same(trl.generate(PROMPTS, **GREEDY), trl_past_the_door.generate(PROMPTS, **GREEDY))
    chats = [[{"role": "user", "content": text}] for text in ("hello", "good bye")]
    same(trl.chat(chats, **GREEDY), trl_past_the_door.chat(chats, **GREEDY))


def test_trl_gets_groups_prompt_by_prompt(trl: Any) -> None:
    found = trl.generate(PROMPTS, n=3, max_tokens=12, generation_kwargs={"ignore_eos": True})
    assert found["prompt_ids"] == PROMPTS
    assert len({tuple(ids) for ids in found["completion_ids"]}) == 6
    for ids, probabilities, named in zip(
        found["completion_ids"], found["logprobs"], found["logprob_token_ids"], strict=True
    ):
        assert [token for (token,) in named] == ids
        assert len(probabilities) == 12
    top = trl.generate(PROMPTS, logprobs=3, **GREEDY)
    assert all(len(step) == 3 for step in top["logprobs"][0])


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_streamed_log_probs_have_token_ids_if_asked(door: Process, route: str) -> None:
    words: dict[str, Any] = {"prompt": PROMPTS[0], "logprobs": 2}
    if route != "completions":
        words = {"messages": [{"role": "user", "content": "hello"}], "logprobs": True,
                 "top_logprobs": 2}  # fmt: skip
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True, "stream": True}
    body = {"model": "tiny-b", "max_tokens": 6, "temperature": 0} | words | more
    with requests.post(f"{door.url}/v1/{route}", json=body, stream=True) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    ids = [f"token_id:{token}" for choice in choices for token in choice.get("token_ids") or ()]
    named = [name for choice in choices for name in names(choice["logprobs"])]
    assert len(ids) == 6
    assert named == ids


def names(logprobs: Any) -> list[str]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"]]
    tokens: list[str] = logprobs["tokens"]
    assert all(name in top for name, top in zip(tokens, logprobs["top_logprobs"], strict=True))
    return tokens


def test_trl_controls_the_engine(trl: Any, tmp_path: Path) -> None:
    assert trl.get_server_info()["weight_transfer_config"]["backend"] == "rose"
    assert trl.get_world_size() == 1
    weights = load_file(next(models.resolve("tiny-b").glob("*.safetensors")))
    files = FileStore(tmp_path / "store", "job")
    publisher = Publisher(files, wire="float32")
    publisher.publish(weights, 11)
    server = Server(lambda job: files)
    where = {
        "store": f"tcp://127.0.0.1:{server.address[1]}",
        "job": "job",
        "folder": str(tmp_path / "copy"),
    }

    def update(version: int) -> None:
        """As TRL's trainer does it, with our backend's words where NCCL's would be."""
        with trl.weight_update():
            told = {"update_info": {"version": version}}
            assert trl.session.post(f"{trl.base_url}/update_weights", json=told).ok
        trl.reset_prefix_cache()

    try:
        before = trl.generate(PROMPTS, **GREEDY)
        assert trl.session.post(
            f"{trl.base_url}/init_weight_transfer_engine", json={"init_info": where}
        ).ok
        torch.manual_seed(5)
        publisher.publish({n: w + 0.05 * torch.randn(w.shape) for n, w in weights.items()}, 12)
        update(12)
        assert call(f"{trl.base_url}/weight_info")[1]["weight_version"] == "12"
        assert trl.generate(PROMPTS, **GREEDY)["completion_ids"] != before["completion_ids"]
        publisher.publish(weights, 13)
        update(13)
        same(trl.generate(PROMPTS, **GREEDY), before)
    finally:
        server.close()


def test_what_the_door_does_not_answer_is_said(trl: Any) -> None:
    with pytest.raises(Exception, match="prompt_logprobs is not answered here"):
        trl.get_sequence_logprobs([[1, 2, 3, 4]], [2], top_logprobs=2)


def test_verifiers_gets_tokens_and_log_probs(
    door: Process, active_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    monkeypatch.setenv("NO_KEY", "none")
    config = TrainClientConfig(
        base_url=f"{door.url}/v1",
        api_key_var="NO_KEY",
        renderer_model_name=str(models.resolve("tiny-b")),
    )
    body = {"model": "tiny-b", "messages": [{"role": "user", "content": "to be or not"}]}
    sampling = SamplingConfig(temperature=0.0, max_tokens=8, ignore_eos=True)

    async def go() -> Any:
        client = TrainClient(config)
        return await client.get_response(ChatDialect(), body, sampling, session_id="trajectory")

    tokens = asyncio.run(go()).tokens
    status, its = call(
        f"{active_node.rollout_url}/inference/v1/generate",
        {
            "token_ids": tokens.prompt_ids,
            "sampling_params": {
                "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1,
            },
        },
    )  # fmt: skip
    assert status == 200
    (choice,) = its["choices"]
    assert tokens.completion_ids == choice["token_ids"]
    probabilities = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert tokens.completion_logprobs == pytest.approx(probabilities, abs=1e-3)
