"""How long an engine step takes on a GPU that nobody measured: a roofline with few constants.

    overhead + max(matmuls at the peak, weights from HBM)     of all tokens of the step
             + KV cache of the context from HBM
             + attention of prompt tokens at the peak
             + all-reduces, two per layer                     with tensor parallelism

Matmuls and reading weights overlap, the rest does not: attention and all-reduces wait for the
layer before. Only sequences that make a token need logits, so the head is computed for them alone.
Peaks are the GPU's, times what engines get out of it (`Efficiency`).

A step tells how much context its requests have together, not whose. A prompt token is taken to
attend to all of it and to half of the step's prompts, but to no more than `span` tokens.

Every term grows with prefill, decode and context, so a bound of a step bounds all smaller ones.
`Measured` is the same for a device with a profile. Both are called millions of times by the
simulator: plain sums of coefficients that are worked out once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rose.executor.latency import LIKELY, QUANTILE, Profile, Step
from rose.plan.hardware import Gpu
from rose.plan.jitter import spread
from rose.plan.shapes import BF16, ModelShape

FITTED = ("mfu", "overhead_s", "margin")
"""The fields of `Efficiency` that are judgement. A preset may set these and no others."""
SPAN = 4096
"""Longest context of a prompt token by default: agents' prompts. A workload knows better."""


@dataclass(frozen=True)
class Efficiency:
    """What engines get out of a GPU's peaks."""

    mfu: float = 0.5
    """FITTED. Share of the tensor cores' peak in prefill. First-token times of 2,048 tokens in
    TensorRT-LLM 0.5's performance page are 0.61 to 0.67 of it on A100 (FP16) and 0.33 to 0.39 on
    H100 (FP8, whose peak is twice as far away). Matmuls alone: 0.80 on H100, 0.87 on A100 (Maximum
    Achievable Matmul FLOPS, S. Bekman, Machine Learning Engineering)."""
    bandwidth: float = 0.8
    """Share of HBM's peak. 0.81 at decode of 7B models where launches hide behind it (L4; arXiv
    2605.30571)."""
    overhead_s: float = 1.5e-3
    """FITTED. Scheduling, launches, sampling. What the other terms leave of a decode step of
    Llama-3.1-8B: 1.3 ms of 6.0 (NVIDIA NIM's performance page, GH200, bf16) and 2.6 ms of 6.5 (vLLM
    performance-benchmark, build 9515, H200, when scheduling did not overlap)."""
    allreduce_s: float = 6e-6
    """Shortest all-reduce of two H100 over NVLink within a CUDA graph (NCCL issue 1259); four GPUs
    are taken to need twice as long, eight three times, as a tree would."""
    link: float = 0.8
    """Share of the link's peak in long all-reduces: 365 of 450 GB/s on H100 (NCCL issue 1455)."""
    margin: float = 1.1
    """FITTED. Bound over mean. Steps of one size vary by less; the line misses by more."""


class Latency(Protocol):
    """Of an engine's step, in seconds; a step without tokens takes none."""

    def mean(self, step: Step) -> float: ...

    def upper(self, step: Step) -> float: ...

    def likely(self, step: Step) -> float:
        """What `executor.latency.LIKELY` of such steps stay under."""


class Roofline:
    """Steps of one model on `tp` GPUs of one kind."""

    __slots__ = (
        "_attended_s",
        "_context_s",
        "_decode_s",
        "_fixed_s",
        "_sent_s",
        "_span",
        "_token_s",
        "_weights_s",
        "margin",
    )

    def __init__(
        self,
        gpu: Gpu,
        shape: ModelShape,
        tp: int = 1,
        *,
        efficiency: Efficiency | None = None,
        span: int = SPAN,
        slowdown: float = 1.0,
    ) -> None:
        """`slowdown`: how much longer steps are beside another engine on the same device."""
        if tp < 1 or shape.heads % tp:
            raise ValueError(f"tp {tp} does not divide the {shape.heads} heads of {shape.name}.")
        if slowdown < 1:
            raise ValueError(f"slowdown {slowdown} is below 1: sharing makes no step shorter.")
        get = efficiency or Efficiency()
        flop_s = slowdown / (gpu.bf16_flops * get.mfu * tp)
        byte_s = slowdown / (gpu.hbm_bytes_per_s * get.bandwidth)
        reduces = 2 * shape.layers if tp > 1 else 0
        sent = shape.hidden * BF16 * 2 * (tp - 1) / tp
        self._fixed_s = slowdown * (get.overhead_s + reduces * get.allreduce_s * math.log2(tp))
        self._weights_s = shape.read_bytes() / tp * byte_s
        self._token_s = 2 * shape.body * flop_s
        self._decode_s = 2 * shape.head * flop_s
        self._context_s = kv_bytes_per_rank(shape, tp) * byte_s
        self._attended_s = shape.attention_flops(1) * flop_s
        self._sent_s = slowdown * reduces * sent / (gpu.link_bytes_per_s * get.link)
        self._span = float(span)
        self.margin = get.margin

    def mean(self, step: Step) -> float:
        prefill, decode, context = step
        tokens = prefill + decode
        if not tokens:
            return 0.0
        busy_s = self._token_s * tokens + self._decode_s * decode
        if busy_s < self._weights_s:
            busy_s = self._weights_s
        attended = context + 0.5 * prefill
        if attended > self._span:
            attended = self._span
        return (
            self._fixed_s
            + busy_s
            + self._context_s * context
            + self._attended_s * attended * prefill
            + self._sent_s * tokens
        )

    def upper(self, step: Step) -> float:
        return self.mean(step) * self.margin

    likely = upper
    """Nothing is known of how steps vary."""


class Measured:
    """Steps of a device with a profile, by the same interface."""

    __slots__ = ("_context_s", "_decode_s", "_fixed_s", "_likely", "_prefill_s", "margin")

    def __init__(
        self, profile: Profile, slowdown: float = 1.0, *, quantile: float = QUANTILE
    ) -> None:
        """`quantile`: share of steps that stay under `upper`, as for the engine's `Tracker`."""
        self._fixed_s = profile.fixed_s * slowdown
        self._prefill_s = profile.per_prefill_s * slowdown
        self._decode_s = profile.per_decode_s * slowdown
        self._context_s = profile.per_context_s * slowdown
        likely, upper = spread(profile).at(np.array([LIKELY, quantile]))
        self._likely, self.margin = float(likely), float(upper)

    def mean(self, step: Step) -> float:
        prefill, decode, context = step
        if not prefill and not decode:
            return 0.0
        return (
            self._fixed_s
            + self._prefill_s * prefill
            + self._decode_s * decode
            + self._context_s * context
        )

    def upper(self, step: Step) -> float:
        return self.mean(step) * self.margin

    def likely(self, step: Step) -> float:
        return self.mean(step) * self._likely


def kv_bytes_per_rank(shape: ModelShape, tp: int) -> float:
    """Of a token on one GPU: with more GPUs than KV heads every GPU holds one all the same."""
    return shape.kv_bytes_per_token() / min(tp, shape.kv_heads)
