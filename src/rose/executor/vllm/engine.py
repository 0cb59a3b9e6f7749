"""What both schedulers have in common: page, latency model, KV quota, clock, threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.platforms import current_platform

from rose.executor import priority
from rose.executor.aside import Guard
from rose.executor.latency import QUANTILE, Profile, Step, Tracker
from rose.executor.page import Page
from rose.executor.vllm.options import DeviceOptions, profile_path
from rose.executor.vllm.parking import Parking

logger = logging.getLogger("vllm.rose")


class Device:
    """An engine's view of its device."""

    def __init__(
        self, scheduler: Any, options: DeviceOptions, page: Page, quantile: float = QUANTILE
    ) -> None:
        self.options = options
        self.page = page
        self.guard = Guard()
        self.latency = Tracker(Profile.load(profile_path(options)), quantile)
        pool = scheduler.kv_cache_manager.block_pool
        tensors = scheduler.kv_cache_config.kv_cache_tensors
        self.parking = Parking(pool, tensors[0].size // scheduler.kv_cache_config.num_blocks)
        self.seconds = device_clock()
        self.placed = False
        self.compute: list[int] = []
        """Threads that compute on the device; known once they are placed."""

    def place_threads(self) -> None:
        """Once, from the thread that computes: pin it to the device, all I/O to the host cores.

        Done at the first step, not at start: loading then happens on the host cores, and vLLM's
        I/O threads, made after loading, do not inherit the compute thread's class.
        """
        self.placed = True
        priority.calm("gloo_tcp_loop")  # a dozen of them poll every 10 ms, for a group of one
        self.compute = priority.compute_threads()
        if self.options.device_cores:
            priority.pin(self.compute, self.options.device_cores)
        if self.options.host_cores:
            others = {t.native_id for t in threading.enumerate() if t.native_id} - set(self.compute)
            priority.pin(others, self.options.host_cores)


def device_clock() -> Callable[[], float]:
    """Seconds of the device: CPU time of the thread that asks for the clock, or time; any thread
    may read it."""
    if not current_platform.is_cpu():
        return time.monotonic
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


def step_of(output: Any) -> tuple[Step, list[tuple[str, int]]]:
    """The shape of a step that vLLM scheduled, and every request's computed tokens after it."""
    prefill = decode = context = 0
    after = []
    cached = output.scheduled_cached_reqs
    parts = [(new.req_id, new.num_computed_tokens, 0) for new in output.scheduled_new_reqs]
    parts += zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    for request_id, before, emitted in parts:
        tokens = output.num_scheduled_tokens[request_id]
        context += before
        if emitted and tokens == 1:
            decode += 1
        else:
            prefill += tokens
        after.append((request_id, before + tokens))
    return Step(prefill, decode, context), after
