"""Arrivals on purpose: a burst at the moment that matters, over usual traffic.

A pattern is a few numbers; `arrivals` is a pure function of them, the scenario and when things
happen in it while it is calm. Up to its first burst a run is that calm run, so bursts hit exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from rose.bench.arrivals import Counts, Times
from rose.plan.job import known
from rose.plan.outcome import Outcome
from rose.plan.scenario import Scenario
from rose.plan.workload.serving import make_traffic
from rose.plan.workload.traffic import Traffic

WORST = 99
"""The percentile of prompts that admission guards against."""
TAIL = 0.75
"""Of trajectories ended: from here a step waits for its last ones."""


class Moments(NamedTuple):
    """When things happen, in seconds."""

    begin: float
    activation: float
    """Borrowed devices take their first turns."""
    tail: float
    sampled: float
    """The first step's last trajectory ends."""
    commit: float
    """New weights are there, and all trajectories of the next step begin at once."""
    end: float


@dataclass(frozen=True)
class Pattern:
    family: str
    at: str
    """A field of `Moments`; `steps`: at the beginning of every step."""
    offset_s: float
    """Of the burst's begin from there."""
    lasting_s: float
    requests: int
    """Of a burst, on each device that it meets."""
    steep: float
    """0: evenly over its time; 1: nearly all at its begin."""
    long_share: float
    """Of its prompts that are as long as the longest that admission expects."""
    longer: float
    """Times longer than that."""
    devices: float
    """Share of the devices that it meets."""
    background: float
    """Share of the usual traffic beside it."""
    seed: int


def moments(calm: Outcome) -> Moments:
    first, second = calm.steps[0], calm.steps[1]
    ended = calm.finished[: first.trajectories]
    lent = next((when for when, count in calm.lent if count), 0.0)
    return Moments(
        0.0, lent, float(np.quantile(ended, TAIL)), first.rollout_s, first.seconds,
        first.seconds + second.rollout_s,
    )  # fmt: skip


def background(scenario: Scenario, share: float, lasting_s: float) -> tuple[Traffic, ...]:
    """Usual traffic of every device, the same for every pattern."""
    serving = scenario.serving
    rate = max(1e-9, share * serving.rate)
    return tuple(
        make_traffic(serving.law, serving.sizes, rate, lasting_s, scenario.seed + 1 + device)
        for device in range(scenario.lendable)
    )


def worst_prompt(scenario: Scenario) -> int:
    """Tokens of the longest new request that admission keeps room for."""
    return int(np.percentile(known(scenario.serving).prompt, WORST))


def arrivals(pattern: Pattern, when: Moments, scenario: Scenario) -> tuple[Traffic, ...]:
    rng = np.random.default_rng(pattern.seed)
    usual = background(scenario, pattern.background, when.end)
    met = max(1, round(pattern.devices * scenario.lendable))
    begins = (when.begin, when.commit) if pattern.at == "steps" else (getattr(when, pattern.at),)
    seen = known(scenario.serving)
    longest = round(worst_prompt(scenario) * pattern.longer)
    return tuple(
        _joined(traffic, [_burst(pattern, begin, seen, longest, rng) for begin in begins])
        if device < met
        else traffic
        for device, traffic in enumerate(usual)
    )


def _burst(
    pattern: Pattern, begin: float, seen: Traffic, longest: int, rng: Generator
) -> tuple[Times, Counts, Counts]:
    count = pattern.requests
    shape = rng.random(count) ** (1.0 + 8.0 * pattern.steep)
    times = np.maximum(0.0, begin + pattern.offset_s) + pattern.lasting_s * np.sort(shape)
    drawn = rng.integers(len(seen), size=count)
    long = rng.random(count) < pattern.long_share
    return times, np.where(long, longest, seen.prompt[drawn]), seen.output[drawn]


def _joined(usual: Traffic, bursts: list[tuple[Times, Counts, Counts]]) -> Traffic:
    parts = [(usual.arrival_s, usual.prompt, usual.output), *bursts]
    times, prompt, output = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(times, kind="stable")
    return Traffic(times[order], prompt[order], output[order], usual.duration_s)
