from __future__ import annotations

import numpy as np
import pytest
from tests.bench.known import hit_rate

from rose.bench.chats import Chats
from rose.bench.traffic import Given, Traffic


def prompts(traffic: Traffic) -> tuple[list[int], ...]:
    assert isinstance(traffic.prompts, Given)
    return traffic.prompts.ids


def judged(traffic: Traffic) -> int:
    return sum(request.arrival_s >= traffic.lead_s for request in traffic.requests)


def test_a_seed_fixes_the_chats() -> None:
    one, same, other = (Chats(1.0).traffic(30.0, seed) for seed in (1, 1, 2))
    assert (one.requests, one.prompts, one.kinds) == (same.requests, same.prompts, same.kinds)
    assert one.prompts != other.prompts


def test_about_sixty_percent_of_the_prompt_tokens_are_known() -> None:
    rates = [hit_rate(Chats(1.0).traffic(60.0, seed)) for seed in range(10)]
    assert np.mean(rates) == pytest.approx(0.6, abs=0.04)
    assert min(rates) > 0.5
    assert max(rates) < 0.7


def test_the_hit_rate_depends_little_on_the_speed_of_the_device() -> None:
    slow, fast = (
        np.mean([hit_rate(Chats(rate).traffic(120.0, seed)) for seed in range(5)])
        for rate in (0.5, 5.0)
    )
    assert slow == pytest.approx(fast, abs=0.04)


def test_turns_come_at_the_rate() -> None:
    counts = [judged(Chats(2.0).traffic(100.0, seed)) / 100.0 for seed in range(20)]
    assert np.mean(counts) == pytest.approx(2.0, rel=0.1)


def test_a_later_turn_goes_on_from_an_earlier_prompt() -> None:
    traffic = Chats(1.0).traffic(60.0, 3)
    asked = list(zip(traffic.requests, prompts(traffic), traffic.kinds, strict=True))
    arrivals = [request.arrival_s for request in traffic.requests]
    assert arrivals == sorted(arrivals)
    later = [one for one in asked if one[0].arrival_s >= traffic.lead_s and one[2] == "later turn"]
    assert later
    for request, prompt, _ in later:
        earlier = [
            other
            for before, other, _ in asked
            if before.arrival_s < request.arrival_s and other == prompt[: len(other)]
        ]
        assert earlier, "its history was never sent"


def test_first_turns_share_a_few_system_prompts() -> None:
    chats = Chats(2.0)
    traffic = chats.traffic(200.0, 4)
    first = [
        p for p, kind in zip(prompts(traffic), traffic.kinds, strict=True) if kind == "first turn"
    ]
    assert len({tuple(prompt[: min(chats.systems)]) for prompt in first}) == len(chats.systems)


def test_everything_fits_into_the_engines() -> None:
    for seed in range(20):
        requests = Chats(2.0).traffic(100.0, seed).requests
        assert max(r.prompt_tokens + r.output_tokens for r in requests) <= 1024
