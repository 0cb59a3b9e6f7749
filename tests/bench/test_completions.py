from __future__ import annotations

import numpy as np
import pytest
from tests.bench.known import hit_rate

from rose.bench.completions import Completions
from rose.bench.traffic import Given


def test_a_seed_fixes_the_completions() -> None:
    one, same, other = (Completions(1.0).traffic(30.0, seed) for seed in (1, 1, 2))
    assert (one.requests, one.prompts) == (same.requests, same.prompts)
    assert one.prompts != other.prompts


def test_prompts_are_long_and_answers_short() -> None:
    traffic = Completions(2.0).traffic(1000.0, 0)
    new = [r for r, kind in zip(traffic.requests, traffic.kinds, strict=True) if kind == "new"]
    assert np.median([request.prompt_tokens for request in new]) == pytest.approx(200, rel=0.1)
    assert np.median([request.output_tokens for request in new]) == pytest.approx(8, abs=1)
    assert max(r.prompt_tokens + r.output_tokens for r in traffic.requests) <= 1024


def test_completions_come_in_bursts_at_the_rate() -> None:
    arrivals = [r.arrival_s for r in Completions(2.0).traffic(600.0, 1).requests]
    windows = np.bincount((np.array(arrivals) / 3.0).astype(int))
    assert windows.mean() == pytest.approx(2.0 * 3.0, rel=0.15)
    assert windows.max() / windows.mean() > 3.0


def test_a_share_completes_in_the_same_file_again_and_nothing_else_is_known() -> None:
    completions = Completions(1.0)
    traffic = completions.traffic(600.0, 2)
    assert isinstance(traffic.prompts, Given)
    again = traffic.kinds.count("again") / len(traffic.kinds)
    assert again == pytest.approx(completions.again, abs=0.06)
    assert 0.2 < hit_rate(traffic) < again
    asked = list(zip(traffic.requests, traffic.prompts.ids, strict=True))
    for (request, prompt), kind in zip(asked, traffic.kinds, strict=True):
        ages = [
            request.arrival_s - before.arrival_s
            for before, other in asked
            if before.arrival_s < request.arrival_s and other == prompt[: len(other)]
        ]
        assert bool(ages) == (kind == "again")
        if ages:
            assert any(completions.age_s[0] <= age <= completions.age_s[1] for age in ages)
