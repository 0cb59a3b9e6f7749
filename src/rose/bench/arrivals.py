"""When requests arrive and how long they are: pure, seeded laws of serving load.

An arrival law turns (rate, duration, rng) into sorted times in [0, duration); a length law turns
a count into token lengths. `schedule` joins them into the `Request`s a load run sends. The same
seed gives the same schedule on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Times = NDArray[np.float64]
Counts = NDArray[np.int64]

WARM_UP_GAPS = 50
"""Mean gaps simulated before time 0, so that a gamma process does not start at an arrival."""


@dataclass(frozen=True)
class Request:
    """One request to send: when, how much to read, how much to write."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class Pattern(StrEnum):
    POISSON = "poisson"
    """Independent arrivals."""
    BURSTY = "bursty"
    """Short bursts whose busiest second is `peak` times the mean."""
    GAMMA = "gamma"
    """Clumped arrivals: gamma gaps with a coefficient of variation above 1."""
    TRACE = "trace"
    """Recorded arrivals and lengths (see `rose.bench.traces`)."""


def poisson(rate: float, duration: float, rng: Generator) -> Times:
    return _uniform(rate, 0.0, duration, rng)


def gamma(rate: float, duration: float, rng: Generator, cv: float = 2.0) -> Times:
    """Renewal process with gamma gaps of mean 1/rate and coefficient of variation `cv`."""
    shape = 1.0 / cv**2
    # Gaps clump over about cv**2 of them, so warm-up and batch size grow with it.
    warm_up = WARM_UP_GAPS * max(1.0, cv**2) / rate
    batch = ceil(rate * (duration + warm_up)) + 16
    now, parts = -warm_up, []
    while now < duration:
        times = now + np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), batch))
        parts.append(times)
        now = float(times[-1])
    every = np.concatenate(parts)
    return every[(every >= 0.0) & (every < duration)]


def bursty(
    rate: float,
    duration: float,
    rng: Generator,
    peak: float = 4.0,
    burst_s: float = 2.0,
    cycle_s: float = 10.0,
    window_s: float = 1.0,
) -> Times:
    """On/off modulated Poisson with mean `rate` whose busiest window is about `peak` x the mean.

    Time is cut into equal cycles of about `cycle_s`; each holds one burst of the fraction
    f = burst_s / cycle_s of it, at a uniformly random place. Inside bursts the rate is
    h = `burst_rate(...)`, outside (rate - f h) / (1 - f), so the mean is `rate` for any
    duration. h is below peak x rate because the busiest of many Poisson windows lies above
    their mean. Under about 1 request per window Poisson noise alone reaches the peak and h
    comes down to `rate`: widen `window_s` and `burst_s` to burst at such rates.
    """
    fraction = burst_s / cycle_s
    on = burst_rate(rate, peak, fraction * duration / window_s, window_s)
    off = (rate - fraction * on) / (1.0 - fraction)
    if off < 0.0:
        raise ValueError(
            f"bursts at {on / rate:.1f} times the mean cannot last {fraction:.0%} of the time: "
            "lower peak or burst_s"
        )
    cycles = max(1, round(duration / cycle_s))
    cycle = duration / cycles
    parts = []
    for index in range(cycles):
        begin, end = index * cycle, (index + 1) * cycle
        burst = begin + rng.uniform(0.0, (1.0 - fraction) * cycle)
        parts += [
            _uniform(off, begin, burst, rng),
            _uniform(on, burst, burst + fraction * cycle, rng),
            _uniform(off, burst + fraction * cycle, end, rng),
        ]
    return np.concatenate(parts)


def burst_rate(rate: float, peak: float, windows: float, window_s: float = 1.0) -> float:
    """Rate in bursts such that the busiest of `windows` Poisson windows holds peak x the mean.

    Solves m + z sqrt(m) = peak x rate x window_s for m, the mean of one window, where z is the
    expected maximum of `windows` standard normals (Blom's approximation).
    """
    count = max(1.0, windows)
    z = NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    root = (-z + np.sqrt(z * z + 4.0 * peak * rate * window_s)) / 2.0
    return max(rate, float(root) ** 2 / window_s)


def _uniform(rate: float, begin: float, end: float, rng: Generator) -> Times:
    return np.sort(rng.uniform(begin, end, rng.poisson(rate * (end - begin))))


class Lengths(Protocol):
    """A law of token lengths, all at least 1."""

    def array(self, count: int, rng: Generator) -> Counts: ...

    def draw(self, count: int, rng: Generator) -> list[int]:
        drawn: list[int] = self.array(count, rng).tolist()
        return drawn


@dataclass(frozen=True)
class Fixed(Lengths):
    tokens: int

    def array(self, count: int, rng: Generator) -> Counts:
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True)
class LogNormal(Lengths):
    """Log-normal with this median and sigma of the logarithm; longer draws become `cap`."""

    median: float
    sigma: float
    cap: int

    def array(self, count: int, rng: Generator) -> Counts:
        raw = np.rint(rng.lognormal(np.log(self.median), self.sigma, count))
        return np.clip(raw, 1, self.cap).astype(np.int64)


@dataclass(frozen=True)
class Drawn(Lengths):
    """Drawn with replacement from lengths seen, for example in a trace."""

    seen: Sequence[int]

    def array(self, count: int, rng: Generator) -> Counts:
        return rng.choice(np.asarray(self.seen, np.int64), count)


def parse_lengths(text: str) -> Lengths:
    """`128` is fixed; `lognormal:MEDIAN,SIGMA,CAP` is a capped log-normal."""
    kind, _, rest = text.rpartition(":")
    try:
        if not kind:
            law: Lengths = Fixed(int(rest))
            usable = int(rest) >= 1
        elif kind == "lognormal":
            median, sigma, cap = rest.split(",")
            law = LogNormal(float(median), float(sigma), int(cap))
            usable = 1.0 <= law.median <= law.cap and 0.0 <= law.sigma < 10.0
        else:
            usable = False
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(
            f"{text!r} is no length: give tokens such as 128 (at least 1), or "
            "lognormal:MEDIAN,SIGMA,CAP such as lognormal:128,0.8,1024"
        )
    return law


def schedule(times: Times, prompt: Lengths, output: Lengths, rng: Generator) -> list[Request]:
    """Give every arrival its lengths; sorted by arrival."""
    count = len(times)
    lengths = zip(prompt.draw(count, rng), output.draw(count, rng), strict=True)
    ordered = np.sort(times).tolist()
    return [Request(at, p, o) for at, (p, o) in zip(ordered, lengths, strict=True)]
