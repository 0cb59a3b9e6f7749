from __future__ import annotations

import pytest

from rose.plan.hardware import GPUS
from rose.plan.memory import HEADROOM, check_fits, kv_capacity_tokens
from rose.plan.shapes import SHAPES

H800 = GPUS["H800"]
SERVING, ROLLOUT = SHAPES["Qwen2.5-7B"], SHAPES["Qwen3-8B"]


def test_kv_capacity_is_what_weights_leave() -> None:
    tokens = kv_capacity_tokens(H800, ROLLOUT)
    assert tokens * ROLLOUT.kv_bytes_per_token() == pytest.approx(53.1e9, rel=0.02)
    assert kv_capacity_tokens(H800, ROLLOUT, headroom=HEADROOM) < 0.75 * tokens
    assert kv_capacity_tokens(H800, ROLLOUT, beside=[SERVING]) < 0.75 * tokens
    asleep = kv_capacity_tokens(H800, ROLLOUT, dormant=1)
    assert 0.9 * tokens < asleep < tokens


def test_more_gpus_hold_more_until_kv_heads_run_out() -> None:
    one, four, eight, sixteen = (kv_capacity_tokens(H800, ROLLOUT, tp) for tp in (1, 4, 8, 16))
    assert four > 4 * one
    assert eight > 2 * four
    assert sixteen < 1.1 * eight


def test_the_papers_devices_fit() -> None:
    check_fits(H800, SERVING, rollout=ROLLOUT, headroom=HEADROOM, context=32_768)
    large = SHAPES["Qwen2.5-32B"], SHAPES["Qwen3-32B"]
    check_fits(H800, large[0], 4, rollout=large[1], headroom=HEADROOM, context=32_768)


def test_what_does_not_fit_is_told_in_a_sentence() -> None:
    llama = SHAPES["Llama-3-70B"]
    with pytest.raises(ValueError, match=r"^Llama-3-70B .* 1 x H800 SXM of 80 GB.*; take tp 4\.$"):
        check_fits(H800, llama)
    with pytest.raises(ValueError, match="take a larger GPU or a smaller model"):
        check_fits(GPUS["L40S"], llama, 4, context=1_000_000)
    assert kv_capacity_tokens(H800, llama) == 0


def test_a_dormant_second_model_needs_little() -> None:
    large = SHAPES["Qwen2.5-32B"]
    check_fits(H800, large, rollout=ROLLOUT, awake=False)
    with pytest.raises(ValueError, match=r"Qwen2.5-32B and Qwen3-8B .* take tp 2"):
        check_fits(H800, large, rollout=ROLLOUT)


def test_headroom_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"headroom 20 is not a share"):
        kv_capacity_tokens(H800, ROLLOUT, headroom=20)
