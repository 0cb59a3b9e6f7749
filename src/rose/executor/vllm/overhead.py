"""What our scheduler costs an engine: time of its own thread per step, without vLLM's own part.

For one step in `EVERY` the scheduler's hooks, and vLLM's methods that they call, are replaced by
timed ones: outer time less inner time is ours. All other steps run without any of this. By the wall
clock (the CPU clock is a system call, and on a cold cache dearer than most of what is measured),
and as a median, because now and then the kernel runs something else in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

EVERY = 16
"""Steps from one measured step to the next."""
REMEMBERED = 64


class Overhead:
    """The scheduler calls vLLM's methods through its attributes `stock_schedule`, `stock_update`.

    `waited` says how long its last `schedule` only waited, which is not counted.
    """

    def __init__(self, scheduler: Any, waited: Callable[[], float] = lambda: 0.0) -> None:
        self._scheduler = scheduler
        self._waited = waited
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    @property
    def microseconds(self) -> float:
        return median(self._recent) * 1e6 if self._recent else 0.0

    def stepped(self) -> None:
        """Another step has ended; from the thread aside."""
        self._steps += 1
        if self._steps % EVERY == 0 and "schedule" not in vars(self._scheduler):
            self._measure_next()

    def _measure_next(self) -> None:
        scheduler, clock = self._scheduler, time.perf_counter
        stock_schedule, stock_update = scheduler.stock_schedule, scheduler.stock_update
        schedule, update = scheduler.schedule, scheduler.update_from_output
        spent: float | None = None

        def outside(hook: Callable[..., Any], *args: Any) -> tuple[Any, float]:
            began = clock()
            result = hook(*args)
            return result, clock() - began

        inner = 0.0

        def inside(hook: Callable[..., Any], *args: Any) -> Any:
            nonlocal inner
            began = clock()
            result = hook(*args)
            inner = clock() - began
            return result

        def timed_schedule(*args: Any) -> Any:
            nonlocal spent
            output, seconds = outside(schedule, *args)
            spent = seconds - inner - self._waited() if output.total_num_scheduled_tokens else None
            return output

        def timed_update(*args: Any) -> Any:
            outputs, seconds = outside(update, *args)
            if spent is not None:
                self._recent.append(spent + seconds - inner)
                del scheduler.schedule, scheduler.update_from_output
                scheduler.stock_schedule, scheduler.stock_update = stock_schedule, stock_update
            return outputs

        scheduler.stock_schedule = lambda *args: inside(stock_schedule, *args)
        scheduler.stock_update = lambda *args: inside(stock_update, *args)
        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update
