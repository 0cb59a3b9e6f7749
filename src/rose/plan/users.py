"""Serving's users: they send requests when their traffic says so, and note when they are answered.

Where the host has no cores of its own (`Host`), a request is work of some device's core before its
engine has it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from rose.plan.device import Device
from rose.plan.engine import Job
from rose.plan.workload.traffic import Traffic

if TYPE_CHECKING:
    from rose.plan.fleet import Fleet


@dataclass
class Served:
    """What users of serving saw, request by request."""

    arrival: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))


class Users:
    def __init__(self, fleet: Fleet, traffic: Sequence[Traffic | None], front_s: float) -> None:
        """`traffic`: of each device; `front_s`: CPU time of the host for a request."""
        self._fleet, self._traffic, self._front_s = fleet, traffic, front_s
        self._next = [0] * len(traffic)
        self.served = Served()
        for device in fleet.devices:
            self._expect(device)

    def _expect(self, device: Device) -> None:
        traffic, index = self._traffic[device.number], self._next[device.number]
        if traffic is not None and index < len(traffic):
            self._fleet.at(float(traffic.arrival_s[index]), partial(self._ask, device))

    def _ask(self, device: Device, now: float) -> None:
        traffic, index = self._traffic[device.number], self._next[device.number]
        assert traffic is not None
        self._next[device.number] += 1
        prompt, output = int(traffic.prompt[index]), int(traffic.output[index])
        job = Job(len(self.served.arrival), prompt, prompt, output)
        self.served.arrival.append(now)
        self.served.ttft.append(math.nan)
        self.served.tpot.append(0.0)
        if self._front_s:
            done = self._fleet.host.work(self._front_s, now, fair=True)
            self._fleet.at(done, partial(self._enter, device, job))
        else:
            self._enter(device, job, now)
        self._expect(device)

    def _enter(self, device: Device, job: Job, now: float) -> None:
        device.advance(now)
        device.arrive(job, now)
        self._fleet.settle(device, now)

    def answered(self, job: Job, first: bool, now: float) -> None:
        """By the first token, or by the last."""
        served = self.served
        if first:
            served.ttft[job.id] = now - served.arrival[job.id]
        elif job.new > 1:
            began = served.arrival[job.id] + served.ttft[job.id]
            served.tpot[job.id] = (now - began) / (job.new - 1)
