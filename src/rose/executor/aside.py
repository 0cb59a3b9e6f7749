"""A second thread for a scheduler, and how it shares vLLM's block pool with the engine's own.

The engine's own thread computes on the device, and after every forward pass its caches are full of
weights: Python costs it about ten times as much there as elsewhere, in time of the device. So it
only notes what happened; `Aside`, on the host cores, turns that into facts and decisions.
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
from typing import Any

from rose.executor.page import Page

logger = logging.getLogger("vllm.rose")

GUARD_LOOK_S = 100e-6
"""The engine is inside for a few hundred microseconds per step."""


class Guard:
    """Keeps vLLM's block pool to one thread at a time, at next to no cost for the engine's own.

    The engine's thread counts itself in and out (`enter` and `leave`, or by hand where a call is
    too dear; it may nest); any other thread uses `with`. Each raises its own flag before it looks
    at the other's, so at least one of them sees both.
    """

    def __init__(self) -> None:
        self.inside = 0
        self.wanted = False
        self._lock = threading.Lock()

    def enter(self) -> None:
        self.inside += 1
        if self.wanted:
            self.wait()

    def leave(self) -> None:
        self.inside -= 1

    def wait(self) -> None:
        """Let the other thread finish first, unless the engine's was inside before."""
        if self.inside == 1:
            self.inside = 0
            with self._lock:
                self.inside = 1

    def __enter__(self) -> None:
        self._lock.acquire()
        self.wanted = True
        while self.inside:
            time.sleep(GUARD_LOOK_S)

    def __exit__(self, *_: object) -> None:
        self.wanted = False
        self._lock.release()


class Aside:
    """A thread that runs what is posted, in order, and `then` once it has caught up.

    `then` also runs when a watched bell rings, and after as many quiet seconds as it returned last.
    If our own code fails here, lending ends: a serving engine goes on within the KV quota it has,
    its facts grow old and nothing is granted any more; a rollout engine (`fatal`) ends, and the
    node starts it again.
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
