"""Seeded sampling survives chunked prefill, which kills vLLM's own CPU worker."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def sample(url: str, prompt: list[int], seed: int) -> list[int]:
    body = {
        "model": "tiny-b",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        ids: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return ids


def test_seeded_turns_in_chunks_give_the_same_draws(active_node: Any, random_prompts: Any) -> None:
    """Prompts longer than a step's 512 tokens, together (chunked and batched) and then alone."""
    prompts = random_prompts(11, 4, 700)
    url = active_node.rollout_url
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda p: sample(url, p[1], seed=p[0]), enumerate(prompts)))
    alone = [sample(url, prompt, seed) for seed, prompt in enumerate(prompts)]
    assert together == alone
    assert len({tuple(ids) for ids in together}) == len(prompts)
    assert sample(url, prompts[0], seed=99) != together[0]
