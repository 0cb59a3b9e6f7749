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

FAILED_S = 0.25
"""Pause after a failure: our own fault must not become a busy loop."""
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
    If our own code fails here, a rollout engine (`fatal`) ends, and the node starts it again. A
    serving engine must not end: what failed is said and left, and the thread goes on; while `then`
    fails, no facts are published, so they grow old and nothing is granted any more. The threads
    that watch bells see to it that there is such a thread.
    """

    def __init__(self, name: str, page: Page, then: Callable[[], float], *, fatal: bool) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]]
        self._jobs = queue.SimpleQueue()
        self._name = name
        self._page = page
        self._then = then
        self._fatal = fatal
        self.failures = 0
        self.post = self._jobs.put
        self._start()

    def nudge(self) -> None:
        """Run `then` soon."""
        self.post((_nothing, ()))

    def watch(self, bell: str) -> None:
        """Run `then` when the bell rings."""

        def loop() -> None:
            while True:
                try:
                    seen = self._page.bell(bell)
                    self.nudge()
                    while not self._page.wait(bell, seen, 1.0):
                        self._revive()
                except Exception:
                    self._failed("rose: the bell %s cannot be heard", bell)
                    time.sleep(FAILED_S)

        threading.Thread(target=loop, name=f"rose-{bell}", daemon=True).start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"rose-{self._name}", daemon=True)
        self._thread.start()

    def _revive(self) -> None:
        if not self._thread.is_alive():
            logger.critical("rose: thread %s has died; starting it again", self._name)
            self._start()

    def _run(self) -> None:
        every_s = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                self._do(*self._jobs.get(timeout=every_s))
            every_s = self.turn()

    def turn(self) -> float:
        """All that was posted, and `then`; how long until that is due again."""
        while not self._jobs.empty():
            self._do(*self._jobs.get())
        try:
            return self._then()
        except Exception:
            self._failed("rose: nothing is lent any more")
            return FAILED_S

    def _do(self, job: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            job(*args)
        except Exception:
            self._failed("rose: what an engine step means for lending was lost")

    def _failed(self, what: str, *args: object) -> None:
        """Say it when it is news, and again after every doubling."""
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            logger.critical(f"{what} (failure {self.failures})", *args, exc_info=True)
        if self._fatal:
            self._end_process()

    def _end_process(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def _nothing() -> None: ...
