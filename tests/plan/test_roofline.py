from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.executor.bounds import Queue, bounds
from rose.executor.latency import ROLLOUT_QUANTILE, Profile, Step
from rose.plan.hardware import GPUS
from rose.plan.roofline import FITTED, Efficiency, Latency, Measured, Roofline
from rose.plan.shapes import SHAPES, ModelShape

H100 = GPUS["H100"]
H200 = replace(H100, name="H200", hbm_bytes_per_s=4.8e12)
LLAMA_8B = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, False)
PROFILE = Profile("m", "d", 0.02, 0.0004, 0.003, 2e-6, margin=1.2, error=0.0)

ALL: list[Latency] = [
    Roofline(H100, SHAPES["Qwen3-8B"]),
    Roofline(GPUS["L40S"], SHAPES["Qwen2.5-7B"], tp=2),
    Roofline(GPUS["H800"], SHAPES["Qwen3-32B"], tp=4, slowdown=1.1),
    Measured(PROFILE),
]
STEPS = st.builds(Step, st.integers(0, 16_384), st.integers(0, 1024), st.integers(0, 2_000_000))


def test_decode_of_one_sequence_is_as_long_as_reading_the_weights() -> None:
    small = Roofline(H100, SHAPES["Qwen2.5-7B"]).mean(Step(0, 1, 1000))
    assert 0.005 < small < 0.008
    large = Roofline(H100, SHAPES["Llama-3-70B"], tp=4).mean(Step(0, 1, 1000))
    assert 0.013 < large < 0.020


def test_prefill_is_as_long_as_its_arithmetic() -> None:
    assert 0.25 < Roofline(H100, SHAPES["Qwen3-8B"]).mean(Step(8192, 0, 0)) < 0.45


@pytest.mark.parametrize(
    ("shape", "tp", "measured_s"),
    [(LLAMA_8B, 1, 0.833 / 128), (SHAPES["Llama-3-70B"], 4, 2.077 / 128)],
)
def test_published_decode_steps(shape: ModelShape, tp: int, measured_s: float) -> None:
    """Batches of 8, 32 tokens in and 128 out: vLLM performance-benchmark, build 9515, H200."""
    assert Roofline(H200, shape, tp).mean(Step(0, 8, 8 * 96)) == pytest.approx(measured_s, rel=0.35)


def test_a_large_batch_is_cheaper_by_the_token_until_arithmetic_limits() -> None:
    latency = Roofline(H100, SHAPES["Qwen3-8B"])
    one, many = latency.mean(Step(0, 1, 500)), latency.mean(Step(0, 64, 64 * 500))
    assert one < many < 3 * one
    assert latency.mean(Step(0, 2048, 0)) > 1.9 * latency.mean(Step(0, 1024, 0))


def test_chunks_of_a_prompt_take_a_little_longer_than_the_whole() -> None:
    latency = Roofline(H100, SHAPES["Qwen3-8B"])
    whole = latency.mean(Step(4096, 0, 0))
    chunks = sum(latency.mean(Step(512, 0, done)) for done in range(0, 4096, 512))
    assert whole < chunks < 1.3 * whole


def test_a_cached_prefix_saves_its_prefill() -> None:
    latency = Roofline(H100, SHAPES["Qwen3-8B"])
    assert latency.mean(Step(256, 0, 3840)) < 0.2 * latency.mean(Step(4096, 0, 0))


@pytest.mark.parametrize("latency", ALL)
@given(step=STEPS, more=st.integers(1, 4096))
def test_no_step_is_shorter_than_a_smaller_one(latency: Latency, step: Step, more: int) -> None:
    if not step.tokens:
        assert latency.mean(step) == 0
        return
    for larger in (
        step._replace(prefill=step.prefill + more),
        step._replace(decode=step.decode + more),
        step._replace(context=step.context + more),
    ):
        assert latency.mean(step) <= latency.mean(larger)
    assert 0 < latency.mean(step) < latency.upper(step)


@given(step=STEPS)
def test_two_gpus_are_faster_but_not_twice(step: Step) -> None:
    one, two = (Roofline(H100, SHAPES["Qwen3-32B"], tp).mean(step) for tp in (1, 2))
    assert two <= one < 2 * two or not step.tokens


def test_the_slower_link_shows() -> None:
    prompt = Step(8192, 0, 0)
    fast = Roofline(H100, SHAPES["Qwen3-32B"], tp=4).mean(prompt)
    slow = Roofline(GPUS["H800"], SHAPES["Qwen3-32B"], tp=4).mean(prompt)
    assert 1.02 < slow / fast < 1.5


def test_sharing_slows_every_term() -> None:
    alone, shared = (Roofline(H100, SHAPES["Qwen3-8B"], slowdown=factor) for factor in (1.0, 1.16))
    for step in (Step(0, 1, 0), Step(2048, 16, 9000)):
        assert shared.mean(step) == pytest.approx(1.16 * alone.mean(step))
    with pytest.raises(ValueError, match=r"slowdown 0.9 is below 1"):
        Roofline(H100, SHAPES["Qwen3-8B"], slowdown=0.9)


def test_heads_are_shared_out_whole() -> None:
    with pytest.raises(ValueError, match=r"tp 8 does not divide the 28 heads of Qwen2.5-7B"):
        Roofline(H100, SHAPES["Qwen2.5-7B"], tp=8)


def test_few_constants_are_judgement() -> None:
    assert set(FITTED) < set(vars(Efficiency()))
    slower = Roofline(H100, SHAPES["Qwen3-8B"], efficiency=Efficiency(mfu=0.25, margin=1.3))
    faster = Roofline(H100, SHAPES["Qwen3-8B"])
    prompt = Step(8192, 0, 0)
    assert slower.mean(prompt) == pytest.approx(2 * faster.mean(prompt), rel=0.01)
    assert slower.upper(prompt) == pytest.approx(1.3 * slower.mean(prompt))


@given(step=STEPS)
def test_a_measured_device_is_its_profile(step: Step) -> None:
    assert Measured(PROFILE).mean(step) == pytest.approx(PROFILE.mean(step))
    assert Measured(PROFILE).upper(step) == pytest.approx(1.2 * PROFILE.mean(step))
    one = Measured(PROFILE, quantile=ROLLOUT_QUANTILE)
    assert one.mean(step) <= one.likely(step) <= one.upper(step)
    assert one.upper(step) <= Measured(PROFILE).upper(step)


def test_what_steps_likely_take_is_what_three_quarters_of_them_took() -> None:
    varied = replace(PROFILE, error=0.1)
    one, step = Measured(varied, quantile=ROLLOUT_QUANTILE), Step(0, 8, 1000)
    assert one.likely(step) == pytest.approx(1.1 * PROFILE.mean(step))
    assert 1.1 < one.upper(step) / one.mean(step) < 1.2


def test_admission_can_use_it() -> None:
    next_s, clear_s = bounds(Queue(8, 2, 3000, 9000), ALL[0], budget=2048, tpot_s=0.15)
    assert 0 < next_s < clear_s < 0.5
