"""What both schedulers have in common: page, latency model, threads, lock, clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

from rose.executor import priority
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.page import Page
from rose.executor.vllm.options import DeviceOptions, profile_path
from rose.executor.vllm.parking import Parking

logger = logging.getLogger("vllm.rose")

LIVENESS_S = 0.25
"""How often the other engine's process is looked up; a dead one keeps its claim that long."""


class Device:
    """An engine's view of its device."""

    def __init__(self, scheduler: Any, options: DeviceOptions, page: Page) -> None:
        self.options = options
        self.page = page
        self.lock = threading.RLock()
        self.latency = Tracker(Profile.load(profile_path(options)))
        pool = scheduler.kv_cache_manager.block_pool
        tensors = scheduler.kv_cache_config.kv_cache_tensors
        self.parking = Parking(pool, tensors[0].size // scheduler.kv_cache_config.num_blocks)
        self.seconds: Callable[[], float] = (
            time.thread_time if current_platform.is_cpu() else time.monotonic
        )
        self.overhead = Overhead()
        self._placed = False

    def place_threads(self) -> None:
        """Once, from the thread that computes: pin it to the device, all I/O to the host cores.

        Done at the first step, not at start: loading then happens on the host cores, and vLLM's
        I/O threads, made after loading, do not inherit the compute thread's class.
        """
        if self._placed:
            return
        self._placed = True
        priority.calm("gloo_tcp_loop")  # a dozen of them poll every 10 ms, for a group of one
        compute = priority.compute_threads()
        if self.options.device_cores:
            priority.pin(compute, self.options.device_cores)
        if self.options.host_cores:
            others = {t.native_id for t in threading.enumerate() if t.native_id} - set(compute)
            priority.pin(others, self.options.host_cores)

    def watch(self, bell: str, act: Callable[[], bool], every_s: float) -> None:
        """Call `act` under the lock whenever the bell rings, also while the engine is idle.

        `act` does a short piece of work and says whether there is more.
        """

        def loop() -> None:
            while True:
                seen = self.page.bell(bell)
                with self.lock:
                    more = act()
                if not more:
                    self.page.wait(bell, seen, every_s)

        threading.Thread(target=loop, name=f"rose-{bell}", daemon=True).start()


class Overhead:
    """CPU time of our code in the engine's thread per step, in microseconds (moving mean)."""

    def __init__(self) -> None:
        self.mean_us = 0.0
        self._spent = 0.0

    def add(self, seconds: float) -> None:
        self._spent += seconds

    def end_step(self) -> None:
        self.mean_us += 0.05 * (self._spent * 1e6 - self.mean_us)
        self._spent = 0.0


def step_of(requests: dict[str, Any], output: Any) -> Step:
    """The shape of a step that vLLM has just scheduled."""
    prefill = decode = context = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        before = request.num_computed_tokens - tokens
        context += before
        if before >= request.num_prompt_tokens and tokens == 1:
            decode += 1
        else:
            prefill += tokens
    return Step(prefill, decode, context)
