"""Serving traffic from a law of arrivals and laws of lengths, scaled to a target load."""

from dataclasses import dataclass

import numpy as np

from rose.bench.arrivals import Lengths
from rose.plan.workload.laws import Law
from rose.plan.workload.recorded import Recorded
from rose.plan.workload.traffic import Traffic


@dataclass(frozen=True)
class Sizes:
    """How long requests are."""

    prompt: Lengths
    output: Lengths


def make_traffic(law: Law, sizes: Sizes | None, rate: float, duration: float, seed: int) -> Traffic:
    """The same for the same arguments, bit for bit. Without `sizes` a record gives its own."""
    for name, value in (("rate", rate), ("duration", duration)):
        if not 0.0 < value < np.inf:
            raise ValueError(f"{name} is {value}: give more than 0")
    rng = np.random.default_rng(seed)
    if sizes is None:
        if not isinstance(law, Recorded):
            raise ValueError(f"{type(law).__name__} says nothing of lengths: give sizes")
        return law.requests(rate, duration, rng)
    times = law.times(rate, duration, rng)
    prompt = sizes.prompt.array(len(times), rng)
    return Traffic(times, prompt, sizes.output.array(len(times), rng), duration)


def rate_for_load(load: float, seconds_per_request: float, devices: int = 1) -> float:
    """Requests per second that keep each device busy for the share `load` of its time."""
    if not (load > 0.0 and seconds_per_request > 0.0):
        raise ValueError(
            f"load is {load} and seconds_per_request {seconds_per_request}: give more than 0"
        )
    return load * devices / seconds_per_request
