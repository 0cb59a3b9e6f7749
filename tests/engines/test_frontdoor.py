"""The front door before a real vLLM engine: the clients people have, and answers as without it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
from safetensors.torch import load_file
from tests.engines.conftest import start_door
from tests.scheduler.conftest import Process, call, until

from rose import models
from rose.scheduler import engine_client
from rose.transfer import Publisher
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Server
from rose.transfer.vllm.client import EngineClient

PROMPT = [9, 8, 7, 6, 5]


@pytest.fixture
def clients(door: Process, active_node: Any) -> dict[str, openai.OpenAI]:
    """Through the door, and past it."""
    urls = {"door": door.url, "engine": active_node.rollout_url}
    return {
        name: openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for name, url in urls.items()
    }


def generate(url: str, most: int, **sampling: Any) -> Any:
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": most, "ignore_eos": True, "logprobs": 1} | sampling,
    }
    status, answer = call(f"{url}/inference/v1/generate", body)
    assert status == 200, answer
    return answer["choices"]


def test_tokens_and_log_probs_are_the_engines(door: Process, active_node: Any) -> None:
    (ours,) = generate(door.url, 24, temperature=0)
    (its,) = generate(active_node.rollout_url, 24, temperature=0)
    assert ours["token_ids"] == its["token_ids"]
    assert ours["finish_reason"] == its["finish_reason"] == "length"
    pairs = zip(ours["logprobs"]["content"], its["logprobs"]["content"], strict=True)
    assert all(abs(mine["logprob"] - other["logprob"]) < 1e-3 for mine, other in pairs)
    assert ours["weight_versions"][-1]["end"] == 24


def test_samples_of_one_prompt_differ(door: Process) -> None:
    choices = generate(door.url, 24, temperature=1.0, n=3, seed=7)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    again = generate(door.url, 24, temperature=1.0, n=3, seed=7)
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in again]


def test_completions_by_the_openai_package(clients: dict[str, openai.OpenAI]) -> None:
    found = {
        name: client.completions.create(
            model="tiny-b", prompt="to be or not", max_tokens=12, temperature=0, logprobs=1,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        for name, client in clients.items()
    }  # fmt: skip
    ours, its = found["door"].choices[0], found["engine"].choices[0]
    assert (ours.text, ours.finish_reason) == (its.text, its.finish_reason)
    assert ours.model_extra["token_ids"] == its.model_extra["token_ids"]
    assert ours.model_extra["prompt_token_ids"] == its.model_extra["prompt_token_ids"]
    assert ours.logprobs.tokens == its.logprobs.tokens
    assert ours.logprobs.token_logprobs == pytest.approx(its.logprobs.token_logprobs, abs=1e-3)
    assert found["door"].usage.completion_tokens == 12


def test_chat_by_the_openai_package(clients: dict[str, openai.OpenAI]) -> None:
    asked = {
        "model": "tiny-b", "max_tokens": 10, "temperature": 0,
        "messages": [{"role": "user", "content": "hello"}], "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    ours, its = (clients[name].chat.completions.create(**asked) for name in ("door", "engine"))
    assert ours.choices[0].message.content == its.choices[0].message.content
    assert ours.choices[0].message.role == "assistant"
    many = clients["door"].chat.completions.create(**asked | {"temperature": 1.0}, n=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2]


def test_streams_by_the_openai_package(clients: dict[str, openai.OpenAI]) -> None:
    asked = {"model": "tiny-b", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    texts = []
    for name in ("door", "engine"):
        chunks = list(
            clients[name].completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        )
        texts.append("".join(c.choices[0].text for c in chunks if c.choices))
    assert texts[0] == texts[1] != ""
    chat = clients["door"].chat.completions.create(
        model="tiny-b", messages=[{"role": "user", "content": "hello"}], max_tokens=8,
        temperature=0, stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip
    whole = clients["engine"].chat.completions.create(
        model="tiny-b", messages=[{"role": "user", "content": "hello"}], max_tokens=8,
        temperature=0, extra_body={"ignore_eos": True},
    )  # fmt: skip
    parts = [chunk.choices[0].delta.content or "" for chunk in chat if chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content


def test_a_revoked_turn_goes_on_and_is_the_same(door: Process, active_node: Any) -> None:
    (whole,) = generate(active_node.rollout_url, 200, temperature=0)
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(generate, door.url, 200, temperature=0)
        time.sleep(0.4)
        active_node.revoke()
        time.sleep(0.3)
        active_node.activate()
        (ours,) = going.result()
    assert ours["token_ids"] == whole["token_ids"]
    pairs = zip(ours["logprobs"]["content"], whole["logprobs"]["content"], strict=True)
    assert all(abs(mine["logprob"] - other["logprob"]) < 1e-3 for mine, other in pairs)


@pytest.mark.parametrize(
    ("route", "body", "said"),
    [
        ("v1/completions", {"model": "tiny-b", "prompt": [99_999_999]}, "vocab"),
        ("v1/completions", {"model": "nobody", "prompt": [1]}, "nobody"),
        ("v1/completions", {"model": "tiny-b", "prompt": [1], "max_tokens": -4}, "max_tokens"),
        ("v1/completions", {"model": "tiny-b", "prompt": [1] * 9999}, "context"),
        ("v1/chat/completions", {"model": "tiny-b", "messages": 3}, "not iterable"),
        ("inference/v1/generate", {"token_ids": [99_999_999]}, "vocab"),
    ],
)
def test_bad_input_is_refused_in_vllms_words(
    door: Process, route: str, body: Any, said: str
) -> None:
    status, answer = call(f"{door.url}/{route}", body)
    assert 400 <= status < 500
    assert said in answer["error"]["message"]
    assert len(generate(door.url, 2)[0]["token_ids"]) == 2


def follow_another_store(url: str, weights: Any, version: int, folder: Path) -> None:
    other = FileStore(folder / "other", "math")
    Publisher(other, wire="float32").publish(weights, version)

    async def go() -> None:
        async with aiohttp.ClientSession() as session:
            engine = EngineClient(session, url)
            await engine.init(f"file://{folder / 'other'}", "math", str(folder / "other-copy"))
            await engine.update(version)

    asyncio.run(go())


def test_an_engine_that_joins_late_is_led_to_the_current_weights_first(
    active_node: Any, tmp_path: Path
) -> None:
    """The store has had two versions before the scheduler, and so the engine, comes; another one,
    which the engine followed until then, is further."""
    original = load_file(next(models.resolve("tiny-b").glob("*.safetensors")))
    weights = original
    files = FileStore(tmp_path / "store", "math")
    publisher = Publisher(files, wire="float32")
    torch.manual_seed(1)
    for version in (4, 5):
        publisher.publish(weights, version)
        weights = {name: value + 0.05 * torch.randn(value.shape) for name, value in weights.items()}
    follow_another_store(active_node.rollout_url, original, 9, tmp_path)
    server = Server(lambda job: files)
    job = f"math,weights=tcp://127.0.0.1:{server.address[1]},folder={tmp_path / 'copy'}"
    made = start_door(active_node, tmp_path, "--job", f"{job},max_staleness=0")
    try:
        (choice,) = generate(made.url, 12, temperature=0)
        assert choice["weight_versions"] == [{"version": "5", "start": 0, "end": 12}]
        publisher.publish(weights, 6)
        until(lambda: call(f"{made.url}/weight_info")[1]["weight_version"] == "6")
        (choice,) = generate(made.url, 12, temperature=0)
        assert choice["weight_versions"][0]["version"] == "6"
        assert '"message": "led"' in made.log()
    finally:
        publisher.publish(original, 7)  # the engine is everybody's
        until(lambda: call(f"{made.url}/weight_info")[1]["weight_version"] == "7")
        made.end()
        server.close()


def test_an_engines_memory_is_known(active_node: Any) -> None:
    async def look() -> int | None:
        async with engine_client.open_session() as session:
            return await engine_client.capacity(session, active_node.rollout_url)

    assert (asyncio.run(look()) or 0) > 1000
