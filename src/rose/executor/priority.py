"""The kernel's help on CPU devices: rollout threads run only when serving leaves the core idle.

`SCHED_IDLE` is sub-step preemption: a serving thread that wakes takes the core from a rollout
thread at once. Whether it works depends on the host (autogroup puts processes of different POSIX
sessions into different scheduling groups, cgroup weights do the same), so `measure` tries it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

TRIAL_S = 0.3
WORKS_BELOW = 0.1
"""An idle-class spinner that gets less than a tenth of a contended core is really preempted."""
DEFAULT_DELAY_S = 0.002
"""Preemption delay assumed when the trial saw none: half a scheduler tick at 250 Hz."""


AHEAD = -19
"""Niceness of a thread that others wait for: it gets 98 of 100 parts of a contended core."""


@dataclass(frozen=True)
class Preemption:
    """What the trial saw on this host."""

    works: bool
    idle_share: float
    """CPU share of an idle-class spinner beside a normal one."""
    delay_s: float
    """Longest time a waking normal thread waited for the core."""

    def __str__(self) -> str:
        if self.works:
            return (
                f"sub-step preemption works: an idle-class thread gets {self.idle_share:.0%} of a "
                f"contended core, serving waits at most {self.delay_s * 1e3:.1f} ms for it"
            )
        return (
            f"sub-step preemption does NOT work here (an idle-class thread still gets "
            f"{self.idle_share:.0%} of a contended core): falling back to the gate alone"
        )


def run_idle(thread: int = 0) -> None:
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    _fall_back(thread)


def run_normal(thread: int = 0) -> bool:
    """Give a thread normal priority; False where the kernel does not allow it."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        _fall_back(thread)
        return True
    return False


def _fall_back(thread: int) -> None:
    if is_ahead(thread):
        os.setpriority(os.PRIO_PROCESS, thread, 0)


def lift(process: int) -> None:
    """Let another process's step end before anything else runs, if its main thread is idle-class.

    Its idle-class threads become normal ones, and where the kernel allows it go `AHEAD` of others:
    side by side with who waits for it, a step would take twice as long and delay both.
    """
    with contextlib.suppress(OSError):
        if is_idle(process):
            for entry in Path(f"/proc/{process}/task").iterdir():
                if is_idle(int(entry.name)) and run_normal(int(entry.name)):
                    with contextlib.suppress(PermissionError):
                        os.setpriority(os.PRIO_PROCESS, int(entry.name), AHEAD)


def is_idle(thread: int = 0) -> bool:
    return os.sched_getscheduler(thread) == os.SCHED_IDLE


def is_ahead(thread: int = 0) -> bool:
    """Lifted, and not fallen back yet."""
    return os.getpriority(os.PRIO_PROCESS, thread) == AHEAD


def compute_threads() -> list[int]:
    """The calling thread and its OpenMP team, not I/O threads of Python, ZeroMQ or gloo.

    OpenMP workers are unknown to Python and keep the name of the process; the others rename
    themselves.
    """
    python = {thread.native_id for thread in threading.enumerate()}
    tasks = Path("/proc/self/task")
    mine = _name(tasks / str(os.getpid()))
    native = {int(entry.name) for entry in tasks.iterdir()} - python
    team = [thread for thread in sorted(native) if _name(tasks / str(thread)) == mine]
    return [threading.get_native_id(), *team]


def _name(task: Path) -> str | None:
    try:
        return (task / "comm").read_text()
    except OSError:  # the thread has ended since
        return None


def calm(name: str, slack_s: float = 0.5) -> None:
    """Let this process's threads of that name oversleep their timeouts; events still wake them.

    Needs CAP_SYS_NICE; without it they keep polling, which costs a percent of a core and no more.
    """
    for task in Path("/proc/self/task").iterdir():
        if (_name(task) or "").strip() == name:
            with contextlib.suppress(OSError):
                Path(f"/proc/{task.name}/timerslack_ns").write_text(str(int(slack_s * 1e9)))


def pin(threads: Iterable[int], cores: Iterable[int]) -> None:
    wanted = set(cores)
    for thread in threads:
        os.sched_setaffinity(thread, wanted)


def measure(core: int, seconds: float = TRIAL_S) -> Preemption:
    """Spin an idle-class and a normal process on one core and see who gets it."""
    context = multiprocessing.get_context("fork")
    start = time.monotonic() + 0.05
    pipes = [context.Pipe() for _ in range(2)]
    spinners = [
        context.Process(target=_spin, args=(core, idle, start, seconds, pipe[1]), daemon=True)
        for idle, pipe in zip((True, False), pipes, strict=True)
    ]
    for spinner in spinners:
        spinner.start()
    (idle_cpu, _), (normal_cpu, delay) = (pipe[0].recv() for pipe in pipes)
    for spinner in spinners:
        spinner.join()
    share = idle_cpu / max(idle_cpu + normal_cpu, 1e-9)
    return Preemption(share < WORKS_BELOW, share, max(delay, DEFAULT_DELAY_S))


def _spin(core: int, idle: bool, start: float, seconds: float, result: Connection) -> None:
    """First contend for the core, then (the normal one) wake up often and see how late it runs."""
    os.sched_setaffinity(0, {core})
    if idle:
        run_idle()
    while time.monotonic() < start:
        time.sleep(0.001)
    began = time.process_time()
    while time.monotonic() < start + seconds / 2:
        pass
    used = time.process_time() - began
    worst = 0.0
    while (now := time.monotonic()) < start + seconds:
        if not idle:
            time.sleep(0.005)
            worst = max(worst, time.monotonic() - now - 0.005)
    result.send((used, worst))
