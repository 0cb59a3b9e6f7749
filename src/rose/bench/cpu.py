"""Who used the cores: CPU time of engines' arithmetic, of a trainer, of everything else."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rose.executor.page import Page

TICKS = os.sysconf("SC_CLK_TCK")


def thread_seconds(pid: int | None) -> float | None:
    """CPU time of a process's main thread, an engine core's arithmetic; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass
class Spent:
    """CPU seconds since counting began."""

    seconds: float = 0.0
    """By the clock on the wall."""
    serving: float = 0.0
    rollout: dict[str, float] = field(default_factory=dict)
    """By device."""
    trainer: float = 0.0
    everything: float = 0.0
    """On this machine."""
    nice: float = 0.0
    """Of that, what gives way to whoever else wants the core: weights that arrive, HTTP servers of
    borrowed devices."""

    @property
    def host_cores(self) -> float:
        """Cores that neither engines' arithmetic nor the trainer took."""
        others = self.serving + sum(self.rollout.values()) + self.trainer
        return max(0.0, self.everything - others) / self.seconds if self.seconds else 0.0


class Counting:
    """Adds up look by look, as engines come and go."""

    def __init__(self, spent: Spent, lent: Page, dedicated: Page, trainer: int) -> None:
        self._spent = spent
        self._lent, self._dedicated, self._trainer = lent, dedicated, trainer
        self._last: dict[str, float] = {}
        self._began = time.monotonic()

    def look(self) -> None:
        now = self._now()
        for name, value in now.items():
            self._add(name.partition(" ")[0], max(0.0, value - self._last.get(name, value)))
        self._last.update(now)
        self._spent.seconds = time.monotonic() - self._began

    def _now(self) -> dict[str, float]:
        """All that is known, by name and process."""
        times = psutil.cpu_times()
        found = {"everything": times.user + times.nice + times.system, "nice": times.nice}
        readings = {
            "serving": self._lent.serving(),
            "lent": self._lent.rollout(),
            "dedicated": self._dedicated.rollout(),
        }
        for name, reading in readings.items():
            pid = reading.writer.pid if reading is not None else None
            if (seconds := thread_seconds(pid)) is not None:
                found[f"{name} {pid}"] = seconds
        try:
            trainer = psutil.Process(self._trainer).cpu_times()
            found["trainer"] = trainer.user + trainer.system
        except psutil.NoSuchProcess:
            pass
        return found

    def _add(self, name: str, seconds: float) -> None:
        if name in ("lent", "dedicated"):
            self._spent.rollout[name] = self._spent.rollout.get(name, 0.0) + seconds
        else:
            setattr(self._spent, name, getattr(self._spent, name) + seconds)
