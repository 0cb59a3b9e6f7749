"""Measure an engine's steps over prefill length, decode batch and context: `rose profile`.

Runs a stock engine in this process with a scheduler that notes the shape and the device seconds of
every step. Imported only in a process of its own: vLLM's platform settings are process-wide.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler

from rose.executor.latency import Profile, Step, fit
from rose.executor.vllm.engine import device_clock, step_of

STEPS: list[tuple[Step, float]] = []


class NotingScheduler(Scheduler):
    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        self._noted, _ = step_of(output)
        self._clock = device_clock()
        self._began = self._clock()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._noted.tokens:
            STEPS.append((self._noted, self._clock() - self._began))
        return super().update_from_output(scheduler_output, model_runner_output)


@dataclass(frozen=True)
class Round:
    """One batch of requests to run: `prompts` of `tokens` each, `output` tokens apiece."""

    prompts: int
    tokens: int
    output: int


def rounds(max_batch: int, max_prompt: int) -> list[Round]:
    """Prefill lengths alone, then decode batches at short and long context."""
    lengths = [n for n in (8, 32, 64, 128, 256, 512) if n <= max_prompt]
    batches = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= max_batch]
    alone = [Round(1, n, 2) for n in lengths for _ in range(3)]
    short = [Round(n, 8, 12) for n in batches]
    long = [Round(n, min(256, max(lengths)), 6) for n in batches if n <= 4]
    return alone + short + long


def measure(
    model: Path,
    device: str,
    *,
    dtype: str,
    max_batch: int,
    max_prompt: int,
    cores: tuple[int, ...],
    progress: Callable[[int, int], None],
) -> Profile:
    from vllm import LLM, SamplingParams

    if cores:
        os.sched_setaffinity(0, cores)
    engine = LLM(
        model=str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=max(2 * max_prompt, 256),
        max_num_seqs=max_batch,
        max_num_batched_tokens=max(512, max_prompt),
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        scheduler_cls=NotingScheduler,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        disable_log_stats=True,
    )
    random = np.random.default_rng(0)
    vocabulary = engine.get_tokenizer().vocab_size

    def run(one: Round) -> None:
        prompts = [
            {"prompt_token_ids": random.integers(3, vocabulary, one.tokens).tolist()}
            for _ in range(one.prompts)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=one.output, ignore_eos=True)
        engine.generate(prompts, sampling, use_tqdm=False)

    run(Round(2, 32, 4))  # the first steps of an engine are slow; they are not the engine
    STEPS.clear()
    plan = rounds(max_batch, max_prompt)
    for done, one in enumerate(plan, 1):
        run(one)
        progress(done, len(plan))
    return fit(str(model), device, STEPS)
