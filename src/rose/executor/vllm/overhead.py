"""What our scheduler costs an engine: time of its own thread per step, without vLLM's own part.

For one step in `EVERY` the scheduler's hooks, and vLLM's methods that they call, are replaced by
timed ones: outer time less inner time is ours, and that of timing. Every second time the timing is
timed by itself, around nothing, and that is taken off: after a forward pass all code is cold, and
looking costs as much as what is looked at. All other steps run without any of this. By the wall
clock (the CPU clock is a system call, and dearer than most of what is measured), and as medians,
because now and then the kernel runs something else in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

EVERY = 16
"""Steps from one timed step to the next."""
REMEMBERED = 64


class Overhead:
    """The scheduler calls vLLM's methods through its attributes `stock_schedule`, `stock_update`.

    `waited` says how long its last `schedule` only waited, which is not counted.
    """

    def __init__(self, scheduler: Any, waited: Callable[[], float] = lambda: 0.0) -> None:
        self._scheduler = scheduler
        self._waited = waited
        self._steps = 0
        self._empty = False
        self._hooks: deque[float] = deque(maxlen=REMEMBERED)
        self._nothing: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def microseconds(self) -> float:
        if not self._hooks or not self._nothing:
            return 0.0
        return max(0.0, median(self._hooks) - median(self._nothing)) * 1e6

    def stepped(self) -> None:
        """Another step has ended; from the thread aside."""
        self._steps += 1
        if self._steps % EVERY == 0 and "schedule" not in vars(self._scheduler):
            self._empty = not self._empty
            self._time_next(self._empty)

    def _time_next(self, empty: bool) -> None:
        scheduler, clock = self._scheduler, time.perf_counter
        stock_schedule, stock_update = scheduler.stock_schedule, scheduler.stock_update
        schedule, update = scheduler.schedule, scheduler.update_from_output
        spent: float | None = None
        inner = 0.0

        def inside(hook: Callable[..., Any], *args: Any) -> Any:
            nonlocal inner
            began = clock()
            result = hook(*args)
            inner = clock() - began
            return result

        def outside(hook: Callable[..., Any], *args: Any) -> tuple[Any, float]:
            timed = around_nothing if empty else hook
            began = clock()
            result = timed(*args)
            seconds = clock() - began - inner
            return (hook(*args) if empty else result), seconds

        def around_nothing(*args: Any) -> Any:
            return inside(_nothing, *args)

        def timed_schedule(*args: Any) -> Any:
            nonlocal spent
            output, seconds = outside(schedule, *args)
            waited = 0.0 if empty else self._waited()
            spent = seconds - waited if output.total_num_scheduled_tokens else None
            return output

        def timed_update(*args: Any) -> Any:
            outputs, seconds = outside(update, *args)
            if spent is not None:
                (self._nothing if empty else self._hooks).append(spent + seconds)
                del scheduler.schedule, scheduler.update_from_output
                scheduler.stock_schedule, scheduler.stock_update = stock_schedule, stock_update
            return outputs

        if not empty:
            scheduler.stock_schedule = lambda *args: inside(stock_schedule, *args)
            scheduler.stock_update = lambda *args: inside(stock_update, *args)
        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update


def _nothing(*_: Any) -> None: ...
