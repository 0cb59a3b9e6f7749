"""What a prefix cache that forgets nothing would find of prompts: whole blocks, in plain Python."""

from __future__ import annotations

from rose.bench.traffic import Given, Traffic

BLOCK = 32


def hit_rate(traffic: Traffic) -> float:
    """Of the prompt tokens in the window. The last token is always computed."""
    assert isinstance(traffic.prompts, Given)
    seen: set[tuple[int, ...]] = set()
    looked_up = found = 0
    for request, prompt in zip(traffic.requests, traffic.prompts.ids, strict=True):
        blocks = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        known = 0
        while known < (len(prompt) - 1) // BLOCK and blocks[known] in seen:
            known += 1
        seen.update(blocks)
        if request.arrival_s >= traffic.lead_s:
            looked_up += len(prompt)
            found += known * BLOCK
    return found / looked_up
