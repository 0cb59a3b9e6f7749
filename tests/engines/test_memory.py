"""KV memory really moves between the engines, and the border is never crossed."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rose.bench.arrivals import Fixed
from rose.executor.facts import LeaseState

MIB = 1 << 20


def resident(pid: int) -> int:
    """Anonymous resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no RssAnon of {pid}")


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(url, method="POST")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def metric(url: str, name: str) -> float:
    """Sum of a metric over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    values = [line.split()[-1] for line in lines if line.startswith((name + "{", name + " "))]
    assert values, f"{url}/metrics has no {name}"
    return sum(map(float, values))


@contextmanager
def watching_the_border(node: Any) -> Iterator[list[tuple[int, int]]]:
    """Samples of (serving quota, rollout resident) while the block runs; checked at its end."""
    samples: list[tuple[int, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            # Rollout is read on both sides: the claim may move between two reads.
            before, serving, after = node.page.rollout(), node.page.serving(), node.page.rollout()
            if before and serving and after and before.facts == after.facts:
                samples.append((serving.facts.kv_quota, after.facts.kv_resident))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
    assert samples
    assert max(quota + held for quota, held in samples) <= node.page.kv_total


def test_dormant_holds_no_memory_and_activation_takes_it(node: Any) -> None:
    assert node.rollout().kv_resident == 0
    assert node.rollout().kv_claim == 0
    assert node.serving().kv_quota == node.serving().kv_max
    with watching_the_border(node):
        for _ in range(3):
            node.activate()
            assert node.rollout().kv_resident > 0
            node.revoke()
            assert (node.rollout().kv_resident, node.rollout().kv_claim) == (0, 0)
    node.until(lambda: node.serving().kv_quota == node.serving().kv_max, "serving has all again")


def test_revoked_memory_goes_back_to_the_system(
    node: Any, complete: Any, random_prompts: Any
) -> None:
    core = node.core("rollout")

    def use(seed: int) -> int:
        node.activate()
        complete(node.rollout_url, "tiny-b", random_prompts(seed, 24, 1800), 8)
        return resident(core)

    use(0)  # buffers of the first long batch stay with the process
    node.revoke()
    dormant = resident(core)
    grown = use(1) - dormant
    assert grown > 15 * MIB
    node.revoke()
    assert node.rollout().kv_resident == 0
    node.until(lambda: resident(core) - dormant < grown / 2, "resident memory falls", 10)


def test_serving_that_jumps_gets_its_memory(
    active_node: Any, start_rollouts: Any, complete: Any, random_prompts: Any, judge: Any
) -> None:
    node = active_node
    before, restarts = node.rollout(), node.status()["restarts"]
    going = start_rollouts(
        node.rollout_url,
        in_flight=24,
        trajectories=24,
        turns=1,
        prompt_tokens=Fixed(1500),
        turn_tokens=Fixed(200),  # so many that most run at once, however slowly prompts come
    )
    node.until(lambda: node.rollout().kv_used > 12 * MIB, "rollouts fill their memory", 180)
    quota = node.serving().kv_quota
    quotas = []
    with watching_the_border(node) as samples:
        answers = complete(node.serving_url, "tiny-a", random_prompts(5, 30, 1900), 16)
        quotas = [serving for serving, _ in samples]
    assert {a.finish_reason for a in answers} == {"length"}
    for answer in answers[::6]:
        judge.accept("tiny-a", answer.prompt, answer.tokens)
    assert max(quotas) > quota
    assert node.rollout().kv_cuts > before.kv_cuts
    record = going.finish()
    lost = node.rollout().ended_reclaimed - before.ended_reclaimed
    assert lost > 0
    assert record.aborts["rose:reclaimed"] <= lost
    assert record.resumed_turns > 0
    assert node.status()["restarts"] == restarts
    node.until(lambda: node.rollout().kv_claim > 0, "rollout grows back")


@contextmanager
def device_kept_busy() -> Iterator[None]:
    """Processes of normal priority on the device's core, so many that the idle class gets less
    than a thousandth of it."""
    spin = "import os\nos.sched_setaffinity(0, {0})\nwhile True: pass"
    spinners = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(16)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lift a thread out of the idle class")
def test_a_rollout_engine_without_cpu_still_lets_go(active_node: Any, start_rollouts: Any) -> None:
    node = active_node
    before, restarts = node.rollout(), node.status()["restarts"]
    going = start_rollouts(
        node.rollout_url,
        in_flight=8,
        trajectories=8,
        turns=1,
        prompt_tokens=Fixed(1500),
        turn_tokens=Fixed(400),
    )
    node.until(lambda: node.rollout().running == 8, "rollouts run")
    with device_kept_busy():
        node.revoke()
        assert node.rollout().kv_resident == 0
        assert node.rollout().running == 0
    assert node.rollout().ended_revoked > before.ended_revoked
    assert node.status()["restarts"] == restarts
    going.abandon()


def test_a_turn_that_is_not_taken_says_why(node: Any) -> None:
    body = {"model": "tiny-b", "prompt": [5, 6, 7], "max_tokens": 4}
    choice = post(f"{node.rollout_url}/v1/completions", body)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "rose:dormant")
    assert node.rollout().state == LeaseState.DORMANT


def test_the_second_turn_finds_its_prefix(active_node: Any, random_prompts: Any) -> None:
    (prompt,) = random_prompts(9, 1, 320)

    def turn(tokens: list[int]) -> Any:
        body = {
            "model": "tiny-b",
            "prompt": tokens,
            "max_tokens": 32,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return post(f"{active_node.rollout_url}/v1/completions", body)

    first = turn(prompt)
    context = prompt + first["choices"][0]["token_ids"]
    second = turn([*context, 9, 8, 7])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(context) // 32 * 32 - 32


@pytest.mark.parametrize("state", ["dormant", "active"])
def test_the_prefix_cache_can_be_reset_while_blocks_are_parked(
    node: Any, complete: Any, random_prompts: Any, judge: Any, state: str
) -> None:
    if state == "active":
        node.activate()
        complete(node.rollout_url, "tiny-b", random_prompts(1, 4, 100), 4)
    before = node.rollout()
    post(f"{node.rollout_url}/reset_prefix_cache")
    after = node.rollout()
    assert (after.kv_resident, after.kv_claim) == (before.kv_resident, before.kv_claim)
    if state == "active":
        (answer,) = complete(node.rollout_url, "tiny-b", random_prompts(1, 1, 100), 8)
        judge.accept("tiny-b", answer.prompt, answer.tokens)


def test_servings_own_api_and_metrics_are_what_they_were(
    active_node: Any, complete: Any, random_prompts: Any
) -> None:
    """Parked blocks are not used blocks, and the usual routes answer as usual."""
    url = active_node.serving_url
    assert active_node.serving().kv_quota < active_node.serving().kv_max
    assert metric(url, "vllm:kv_cache_usage_perc") == 0.0
    served = metric(url, "vllm:request_success_total")
    complete(url, "tiny-a", random_prompts(2, 3, 50), 4)
    assert metric(url, "vllm:request_success_total") == served + 3
    assert metric(url, "vllm:kv_cache_usage_perc") == 0.0
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["tiny-a"]
    chat = {"model": "tiny-a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert post(f"{url}/v1/chat/completions", chat)["choices"][0]["finish_reason"]
