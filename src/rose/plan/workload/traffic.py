"""Serving requests as arrays: when, how much to read, how much to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from rose.bench.arrivals import Counts, Request, Times


@dataclass(frozen=True, eq=False)
class Traffic:
    """Requests by arrival within [0, duration_s). Arrays are shared, not copied: leave them be."""

    arrival_s: Times
    prompt: Counts
    output: Counts
    duration_s: float

    def __post_init__(self) -> None:
        if not len(self.arrival_s) == len(self.prompt) == len(self.output):
            raise ValueError("arrival_s, prompt and output differ in length")
        if np.any(np.diff(self.arrival_s) < 0.0):
            raise ValueError("arrival_s is not sorted")

    @classmethod
    def of(cls, requests: Sequence[Request], duration_s: float | None = None) -> Traffic:
        """As they are; without a duration they last one mean gap longer than to the last."""
        rows = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests]
        columns = np.asarray(rows, np.float64).reshape(-1, 3)
        arrival, lengths = columns[:, 0].copy(), columns[:, 1:].astype(np.int64)
        if duration_s is None:
            count = len(arrival)
            duration_s = float(arrival[-1]) * count / (count - 1) if count > 1 else 0.0
        return cls(arrival, lengths[:, 0].copy(), lengths[:, 1].copy(), duration_s)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self) / self.duration_s if self.duration_s > 0.0 else 0.0

    def take(self, index: Counts) -> Traffic:
        """These requests, in order of arrival."""
        return Traffic(
            self.arrival_s[index], self.prompt[index], self.output[index], self.duration_s
        )

    def slice(self, begin: float, end: float) -> Traffic:
        """What arrives from `begin` until before `end`, with `begin` as time 0."""
        first, last = np.searchsorted(self.arrival_s, (begin, end))
        return Traffic(
            self.arrival_s[first:last] - begin,
            self.prompt[first:last],
            self.output[first:last],
            end - begin,
        )

    def deal(self, devices: int, rng: Generator) -> Counts:
        """Each request's device, at random.

        A swing of the rate reaches all devices at once. Clumps of a few arrivals thin out: what one
        of many devices gets of a gamma stream is nearly Poisson (`laws.Copied` keeps clumps).
        """
        return rng.integers(devices, size=len(self))

    def split(self, devices: int, rng: Generator) -> list[Traffic]:
        """Dealt to devices."""
        device = self.deal(devices, rng)
        order = np.argsort(device, kind="stable")
        ends = np.cumsum(np.bincount(device, minlength=devices))
        return [self.take(part) for part in np.split(order, ends[:-1])]
