"""What both schedulers have in common: page, latency model, KV quota, clock, and a second thread.

The engine's own thread computes on the device, and after every forward pass its caches are full of
weights: Python costs it about ten times as much there as elsewhere, in time of the device. So it
only notes what happened; `Aside`, a thread on the host cores, turns that into facts and decisions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.platforms import current_platform

from rose.executor import priority
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.page import Page
from rose.executor.vllm.options import DeviceOptions, profile_path
from rose.executor.vllm.parking import Parking

logger = logging.getLogger("vllm.rose")

GUARD_LOOK_S = 100e-6
"""The engine is inside for a few hundred microseconds per step."""
LIVENESS_S = 0.25
"""How often the other engine's process is looked up; a dead one keeps its claim that long."""


class Guard:
    """Keeps vLLM's block pool to one thread at a time, at next to no cost for the engine's own.

    The engine's thread calls `enter` and `leave` (and may nest them); any other thread uses `with`.
    Each raises its own flag before it looks at the other's, so at least one of them sees both.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._wanted = False
        self._lock = threading.Lock()

    def enter(self) -> None:
        self._inside += 1
        if self._wanted and self._inside == 1:
            self._inside = 0
            with self._lock:
                self._inside = 1

    def leave(self) -> None:
        self._inside -= 1

    def __enter__(self) -> None:
        self._lock.acquire()
        self._wanted = True
        while self._inside:
            time.sleep(GUARD_LOOK_S)

    def __exit__(self, *_: object) -> None:
        self._wanted = False
        self._lock.release()


class Device:
    """An engine's view of its device."""

    def __init__(self, scheduler: Any, options: DeviceOptions, page: Page) -> None:
        self.options = options
        self.page = page
        self.guard = Guard()
        self.latency = Tracker(Profile.load(profile_path(options)))
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
    """Seconds of the device, readable from any thread: CPU time of the calling thread, or time."""
    if not current_platform.is_cpu():
        return time.monotonic
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


class Aside:
    """A thread that runs what is posted, in order, and `then` once it has caught up.

    `then` also runs when a watched bell rings, and after as many quiet seconds as it returned last.
    If our own code fails here, lending ends: a serving engine goes on as a stock one, its facts
    grow old and nothing is granted any more; a rollout engine (`fatal`) ends, and the node sees it.
    """

    def __init__(self, name: str, page: Page, then: Callable[[], float], *, fatal: bool) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]]
        self._jobs = queue.SimpleQueue()
        self._page = page
        self._then = then
        self._fatal = fatal
        self.post = self._jobs.put
        threading.Thread(target=self._run, name=f"rose-{name}", daemon=True).start()

    def nudge(self) -> None:
        """Run `then` soon."""
        self.post((_nothing, ()))

    def watch(self, bell: str) -> None:
        """Run `then` when the bell rings."""

        def loop() -> None:
            while True:
                seen = self._page.bell(bell)
                self.nudge()
                while not self._page.wait(bell, seen, 1.0):
                    pass

        threading.Thread(target=loop, name=f"rose-{bell}", daemon=True).start()

    def _run(self) -> None:
        every_s = 0.0
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    job, args = self._jobs.get(timeout=every_s)
                    job(*args)
                    while not self._jobs.empty():
                        job, args = self._jobs.get()
                        job(*args)
                every_s = self._then()
        except Exception:
            logger.critical("rose: nothing is lent any more", exc_info=True)
            if self._fatal:
                os.kill(os.getpid(), signal.SIGTERM)


def _nothing() -> None: ...


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
