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
    host_cores: tuple[int, ...] = ()
    """CPU devices: the other cores we may use; the device's own where there are no others."""
    gpu: int | None = None


def parse_device(name: str) -> Device:
    if found := _CPU.fullmatch(name):
        first = int(found[1])
        cores = tuple(range(first, int(found[2] or first) + 1))
        here = os.sched_getaffinity(0)
        if not cores or not set(cores) <= here:
            raise ValueError(f"device {name!r}: this process may use cores {sorted(here)}")
        return Device(name, cores, tuple(sorted(here - set(cores))) or cores)
    if found := _CUDA.fullmatch(name):
        return Device(name, gpu=int(found[1]))
    raise ValueError(f"device {name!r} is unknown: use cpu:N, cpu:N-M or cuda:N")
