"""A device by name: `cpu:0` (core 0), `cpu:0-3`, `cuda:0` (not yet run)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_CPU = re.compile(r"cpu:(\d+)(?:-(\d+))?")
_CUDA = re.compile(r"cuda:(\d+)")


@dataclass(frozen=True)
class Device:
    name: str
    cores: tuple[int, ...] = ()
    """CPU devices: the cores that compute."""
    gpu: int | None = None

    @property
    def host_cores(self) -> tuple[int, ...]:
        """The other cores of the host; the device's own where there are no others."""
        every = set(range(os.cpu_count() or 1))
        return tuple(sorted(every - set(self.cores))) or tuple(sorted(every))


def parse_device(name: str) -> Device:
    if found := _CPU.fullmatch(name):
        first = int(found[1])
        cores = tuple(range(first, int(found[2] or first) + 1))
        here = set(range(os.cpu_count() or 1))
        if not cores or not set(cores) <= here:
            raise ValueError(f"device {name!r}: this host has cores {sorted(here)}")
        return Device(name, cores)
    if found := _CUDA.fullmatch(name):
        return Device(name, gpu=int(found[1]))
    raise ValueError(f"device {name!r} is unknown: use cpu:N, cpu:N-M or cuda:N")
