from __future__ import annotations

import numpy as np
import pytest
from tests.bench.known import hit_rate

from rose.bench.arrivals import Request
from rose.bench.surges import AT_ONCE_S, Surges
from rose.bench.traffic import Traffic

KV_TOKENS = 5825


def surges_of(traffic: Traffic) -> list[list[Request]]:
    """Long requests, together when they come at once."""
    found: list[list[Request]] = []
    for request, kind in zip(traffic.requests, traffic.kinds, strict=True):
        if kind != "surge":
            continue
        if found and request.arrival_s - found[-1][0].arrival_s <= AT_ONCE_S:
            found[-1].append(request)
        else:
            found.append([request])
    return found


def test_a_seed_fixes_the_surges() -> None:
    one, same, other = (Surges(1.0, KV_TOKENS).traffic(30.0, seed) for seed in (1, 1, 2))
    assert (one.requests, one.prompts) == (same.requests, same.prompts)
    assert one.prompts != other.prompts


def test_a_surge_needs_a_quarter_to_half_of_the_memory() -> None:
    surges = Surges(1.0, KV_TOKENS)
    one_prompt = surges.prompt.cap / KV_TOKENS
    for seed in range(10):
        for surge in surges_of(surges.traffic(100.0, seed)):
            share = sum(request.prompt_tokens for request in surge) / KV_TOKENS
            assert 0.25 - one_prompt / 2 <= share <= 0.5 + one_prompt / 2
            assert len(surge) > 1


def test_surges_and_short_requests_together_come_at_the_rate() -> None:
    surges = Surges(1.0, KV_TOKENS)
    counts, shares = [], []
    for seed in range(20):
        traffic = surges.traffic(300.0, seed)
        counts.append(len(traffic.requests) / 300.0)
        shares.append(traffic.kinds.count("surge") / len(traffic.kinds))
        assert len(surges_of(traffic)) == round(300.0 / surges.cycle_s)
    assert np.mean(counts) == pytest.approx(1.0, rel=0.07)
    assert np.mean(shares) == pytest.approx(1 / (1 + surges.base_per_long), rel=0.1)


def test_even_a_short_window_has_a_surge() -> None:
    assert len(surges_of(Surges(0.2, KV_TOKENS).traffic(10.0, 0))) == 1


def test_nothing_is_sent_twice() -> None:
    assert hit_rate(Surges(1.0, KV_TOKENS).traffic(300.0, 0)) == 0.0
