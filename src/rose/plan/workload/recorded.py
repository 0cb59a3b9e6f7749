"""Laws that follow a record: of requests, or of rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np
from numpy.random import Generator

from rose.bench import rates, traces
from rose.bench.arrivals import Counts, Times
from rose.bench.traces import BadRow, TraceError
from rose.plan.workload.curve import Curve
from rose.plan.workload.laws import Law, Poisson, copies
from rose.plan.workload.traffic import Traffic


@dataclass(frozen=True, eq=False)
class Recorded:
    """Requests of a trace on the trace's own clock, each as often as it takes to reach the rate.

    Bursts last as long as they did, and dealt to more devices they reach all of them. A run longer
    than the record begins it anew. For a record stretched in time instead, give `Traffic.of` what
    `rose.bench.traces.scale` made.
    """

    traffic: Traffic
    bad_rows: tuple[BadRow, ...] = ()

    @classmethod
    def read(cls, path: Path, *, skip_bad_rows: bool = False) -> Recorded:
        """Any format that `rose.bench.traces` knows. Raises TraceError."""
        trace = traces.load(path)
        _refuse(trace.bad_rows, skip_bad_rows)
        return cls(Traffic.of(trace.requests), trace.bad_rows)

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        return self.requests(rate, duration, rng).arrival_s

    def requests(self, rate: float, duration: float, rng: Generator) -> Traffic:
        """The arrivals with the lengths they had."""
        times, index = self._played(duration)
        chosen = copies(len(times), rate * duration / len(times), rng)
        index = index[chosen]
        prompt, output = self.traffic.prompt[index], self.traffic.output[index]
        return Traffic(times[chosen], prompt, output, duration)

    def _played(self, duration: float) -> tuple[Times, Counts]:
        """Over and over until `duration`: times, and which request each one is."""
        span = self.traffic.duration_s
        laps = ceil(duration / span) if span > 0.0 else 1
        times = (self.traffic.arrival_s + span * np.arange(laps)[:, None]).ravel()
        played = int(np.searchsorted(times, duration))
        return times[:played], np.arange(played) % len(self.traffic)


@dataclass(frozen=True, eq=False)
class RateCurve:
    """Rates per window, in the proportions recorded; begins anew at the end of the record."""

    begins_s: Times
    rates: Times
    start_s: float = 0.0
    """Where in the record the run begins."""
    base: Law = field(default=Poisson())

    @classmethod
    def read(
        cls, path: Path, column: str, *, start_s: float = 0.0, skip_bad_rows: bool = False
    ) -> RateCurve:
        """`window_start_s,*_rps`, the column by its name. Raises TraceError."""
        found = rates.load(path)
        _refuse(found.bad_rows, skip_bad_rows)
        return cls(found.begins_s, found.column(column), start_s)

    @property
    def span_s(self) -> float:
        """The last window counts as long as the one before it."""
        begins = self.begins_s
        last = begins[-1] - begins[-2] if len(begins) > 1 else 1.0
        return float(begins[-1] - begins[0] + last)

    @property
    def mean_rate(self) -> float:
        """Requests per second of the record."""
        ends = np.append(self.begins_s[1:], self.begins_s[0] + self.span_s)
        return float(np.average(self.rates, weights=ends - self.begins_s))

    def times(self, rate: float, duration: float, rng: Generator) -> Times:
        span, start = self.span_s, self.start_s % self.span_s
        laps = ceil((start + duration) / span)
        begins = (self.begins_s - self.begins_s[0] + span * np.arange(laps)[:, None]).ravel()
        edges = np.clip(np.append(begins, laps * span) - start, 0.0, duration)
        curve = Curve(edges, np.tile(self.rates, laps))
        return curve.warp(self.base.times(rate, duration, rng))


def _refuse(bad_rows: Sequence[BadRow], skip: bool) -> None:
    if bad_rows and not skip:
        raise TraceError(
            f"{len(bad_rows)} unusable rows in the trace, the first {bad_rows[0]}: "
            "mend them or have them skipped"
        )
