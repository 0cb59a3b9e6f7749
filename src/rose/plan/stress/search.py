"""Random patterns of every family, then small changes to the worst. Same seed, same search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp

import numpy as np
from numpy.random import Generator

from rose.plan.progress import Say, quiet
from rose.plan.stress.pattern import Pattern
from rose.plan.stress.trial import Bench, Hurt
from rose.plan.system import System

BACKGROUNDS = (0.0, 0.5, 1.0)
"""Few levels: a fleet's calm run is simulated once for each."""
RANDOM = 0.5
"""Share of the tries that are drawn anew; the others change the worst so far a little."""
MOST = 64
"""Requests of a burst on a device: with more all are late, lent or not."""
NUDGE = 0.3
"""Of the logarithm of a number that is changed."""


@dataclass(frozen=True)
class Worst:
    pattern: Pattern
    hurt: Hurt
    score: float


def _drawn(family: str, rng: Generator, **given: float | str) -> Pattern:
    values = {
        "at": "activation",
        "offset_s": float(rng.uniform(-1.0, 3.0)),
        "lasting_s": float(np.exp(rng.uniform(np.log(0.02), np.log(20.0)))),
        "requests": int(np.exp(rng.uniform(0.0, np.log(48.0)))),
        "steep": float(rng.random()),
        "long_share": float(rng.choice((0.0, 0.2, 1.0))),
        "longer": 1.0,
        "devices": float(rng.choice((0.34, 0.67, 1.0))),
        "background": float(rng.choice(BACKGROUNDS)),
        "seed": int(rng.integers(1 << 31)),
    } | given
    return Pattern(family, **values)  # type: ignore[arg-type]


def _any_time(rng: Generator) -> float:
    return float(rng.uniform(0.0, 60.0))


FAMILIES: dict[str, Callable[[Generator], Pattern]] = {
    "at activation": lambda rng: _drawn("at activation", rng),
    "at commit": lambda rng: _drawn("at commit", rng, at="commit"),
    "in the tail": lambda rng: _drawn("in the tail", rng, at="tail", offset_s=_any_time(rng)),
    "with every step": lambda rng: _drawn("with every step", rng, at="steps", devices=1.0),
    "long prompts only": lambda rng: _drawn(
        "long prompts only", rng, offset_s=_any_time(rng), long_share=1.0,
        lasting_s=float(rng.uniform(5.0, 60.0)), longer=float(rng.choice((1.0, 2.0))),
    ),
    "flash crowd": lambda rng: _drawn(
        "flash crowd", rng, offset_s=_any_time(rng), devices=1.0,
        requests=int(rng.integers(16, 64)), lasting_s=float(rng.uniform(0.02, 1.0)),
    ),
    "one by one": lambda rng: _drawn(
        "one by one", rng, offset_s=_any_time(rng), background=0.0, steep=0.0,
        lasting_s=60.0, requests=int(rng.integers(8, 40)),
    ),
}  # fmt: skip
"""`one by one` keeps the premise of the proof: requests far apart, so one unseen at a time."""


def nudged(pattern: Pattern, rng: Generator) -> Pattern:
    """A little other: when, how long, how many, and what luck draws."""

    def factor() -> float:
        return exp(NUDGE * float(rng.standard_normal()))

    return replace(
        pattern,
        offset_s=pattern.offset_s + 0.2 * float(rng.standard_normal()),
        lasting_s=pattern.lasting_s * factor(),
        requests=min(MOST, max(1, round(pattern.requests * factor()))),
        steep=min(1.0, max(0.0, pattern.steep + 0.1 * float(rng.standard_normal()))),
        seed=int(rng.integers(1 << 31)) if rng.random() < 0.5 else pattern.seed,
    )


def search(
    bench: Bench, system: System, tries: int, seed: int, say: Say = quiet
) -> dict[str, Worst]:
    """The worst pattern of every family, the worst of all first."""
    rng = np.random.default_rng(seed)
    slo = bench.scenario.serving.slo
    found: dict[str, Worst] = {}
    each = max(1, tries // len(FAMILIES))
    for family, draw in FAMILIES.items():
        progress = say(f"{system.says}: {family}")
        for number in range(each):
            worst = found.get(family)
            anew = worst is None or number < RANDOM * each
            pattern = draw(rng) if anew or worst is None else nudged(worst.pattern, rng)
            hurt = bench.trial(pattern, system)
            score = hurt.score(slo)
            if worst is None or score > worst.score:
                found[family] = Worst(pattern, hurt, score)
            progress((number + 1) / each)
    return dict(sorted(found.items(), key=lambda item: -item[1].score))
