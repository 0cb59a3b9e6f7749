"""How long an engine step takes: a profiled line, corrected online, with an upper bound.

    step seconds = c0 + c1 * prefill tokens + c2 * decode sequences + c3 * context tokens

`rose profile` fits the coefficients (non-negative least squares on relative error). A running
engine feeds its steps into `Tracker.observe`; the last `WINDOW` of them correct the line, its fixed
part by one factor and all that grows by another. Admission uses `upper`, a high quantile of the
ratios measured/predicted times the line, never the mean. The tracker keeps score of itself: `error`
(of the profile as it was) and `coverage` (share of steps under the bound predicted for them).

Seconds are *device* seconds: on CPU the thread's CPU time, because under SCHED_IDLE the wall clock
of a preempted step says nothing about its cost.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

WINDOW = 256
"""Steps remembered: long enough for a 99th percentile, short enough to follow a slower phase."""
QUANTILE = 0.99
"""Share of serving's steps that must stay under the bound."""
ROLLOUT_QUANTILE = 0.95
"""The same for rollout's. A longer one only matters if a worst-case serving request comes just then
and serving's own step takes all of its bound: all three at once are much rarer than one in 20."""
LIKELY = 0.75
"""Share of steps that stay under `likely`. Lateness is what sticks out, so the middle one would
count less than half of it; three quarters come within a tenth (steps that vary by a tenth)."""
TRUSTED_AFTER = 64
"""Until this many steps are seen the profile's own margin is a floor of the bound."""
ROUNDING = 1.0 - 1e-9
"""Keeps a step that just fits from being a rounding error too long."""
CORRECTED_EVERY = 16
"""Steps from one correction of the line to the next."""
PULL = 2.0
"""Weight of the median ratio in the correction, in steps that are all fixed or all the rest."""
FARTHEST = 2.0
"""A factor is never farther from the median ratio than this."""
MIN_MARGIN = 1.02
"""A bound is never tighter than this: clocks and schedulers jitter by a percent or two."""


class Step(NamedTuple):
    """What one engine step computes. (A tuple: made several times per step, on the hot path.)"""

    prefill: int
    decode: int
    context: int
    """Tokens already in the KV cache of the scheduled requests, which attention reads."""

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode


class Fit(NamedTuple):
    """Steps that fit into some time: most prefill tokens, falling with the decode sequences."""

    alone: float
    per_decode: float

    def tokens(self, decode: int, most_prefill: int) -> int:
        """Tokens of a step with all `decode` sequences and some prompts, or as many as fit."""
        prefill = self.alone - self.per_decode * decode
        if prefill < 0:
            return int(self.alone / self.per_decode) if self.alone > 0 else 0
        return decode + (most_prefill if prefill > most_prefill else int(prefill))


NOTHING = Fit(-1.0, 0.0)


@dataclass(frozen=True)
class Profile:
    """The fitted line of one model on one device, as saved by `rose profile`."""

    model: str
    device: str
    fixed_s: float
    per_prefill_s: float
    per_decode_s: float
    per_context_s: float
    margin: float
    """`QUANTILE` of measured/predicted over the profiling run."""
    error: float
    """Median relative error over the profiling run."""
    steps: int = 0

    def mean(self, step: Step) -> float:
        if not step.tokens:
            return 0.0
        return (
            self.fixed_s
            + self.per_prefill_s * step.prefill
            + self.per_decode_s * step.decode
            + self.per_context_s * step.context
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Profile:
        try:
            profile = cls(**json.loads(path.read_text()))
            for name, value in asdict(profile).items():
                if name not in ("model", "device") and not 0 <= value < math.inf:
                    raise ValueError(f"{name} is {value}")
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"latency profile {path}: {error}") from error
        return profile


def fit(model: str, device: str, steps: list[tuple[Step, float]]) -> Profile:
    """The line through measured steps, by non-negative least squares on the relative error."""
    if len(steps) < 8:
        raise ValueError(f"a latency profile needs at least 8 measured steps, got {len(steps)}")
    rows = np.array([[1.0, s.prefill, s.decode, s.context] for s, _ in steps])
    seconds = np.array([t for _, t in steps])
    coefficients = _non_negative(rows / seconds[:, None], np.ones(len(steps)))
    ratios = seconds / np.maximum(rows @ coefficients, 1e-9)
    fixed, per_prefill, per_decode, per_context = (float(c) for c in coefficients)
    return Profile(
        model,
        device,
        fixed,
        per_prefill,
        per_decode,
        per_context,
        margin=max(MIN_MARGIN, float(np.quantile(ratios, QUANTILE))),
        error=float(np.median(np.abs(ratios - 1.0))),
        steps=len(steps),
    )


def _non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares with coefficients >= 0: drop the most negative one until none is left."""
    keep = list(range(a.shape[1]))
    while True:
        solution = np.linalg.lstsq(a[:, keep], b, rcond=None)[0]
        if (solution >= 0).all():
            full = np.zeros(a.shape[1])
            full[keep] = solution
            return full
        del keep[int(np.argmin(solution))]


class Likely(NamedTuple):
    """What most steps stay under: for sums over many, where the bound would overstate."""

    line: Profile
    margin: float

    def upper(self, step: Step) -> float:
        return self.line.mean(step) * self.margin


class Tracker:
    """A profile that follows the running engine. Not thread-safe; one per engine."""

    def __init__(self, profile: Profile, quantile: float = QUANTILE) -> None:
        self.profile = profile
        self.line = profile
        """The profile as corrected: its fixed part, and the part that grows, by a factor each."""
        self._quantile = quantile
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        """Of each step the fixed part of the profile's prediction, the other part, and the time."""
        self._sorted: list[float] = []
        """Their times over the line's, in order."""
        self._factors = (1.0, 1.0)
        self.error = 0.0
        """Relative error of the profile as it was, in the median, at the last correction."""
        self._seen = 0
        self.margin = self._margin()
        """Bound over line; computed once per observed step, read many times."""
        self._covered = 0

    def mean(self, step: Step) -> float:
        return self.line.mean(step) * self._ratio(0.5, otherwise=1.0)

    def _margin(self) -> float:
        recent = self._ratio(self._quantile, otherwise=self.profile.margin)
        if len(self._sorted) < TRUSTED_AFTER:
            recent = max(recent, self.profile.margin)
        return max(recent, MIN_MARGIN)

    def upper(self, step: Step) -> float:
        return self.line.mean(step) * self.margin

    @property
    def likely(self) -> Likely:
        return Likely(self.line, min(self._ratio(LIKELY, otherwise=self.margin), self.margin))

    def within(self, seconds: float, context: int) -> Fit:
        """The steps whose bound is at most `seconds`, for requests with that much context."""
        if seconds <= 0:
            return NOTHING
        line = self.line
        per_prefill = max(line.per_prefill_s, 1e-12)
        spare = seconds * ROUNDING / self.margin - line.fixed_s - line.per_context_s * context
        return Fit(spare / per_prefill, line.per_decode_s / per_prefill)

    def observe(self, step: Step, seconds: float) -> None:
        if not step.tokens or seconds <= 0 or self.line.mean(step) <= 0:
            return
        self._seen += 1
        self._covered += seconds <= self.upper(step)
        fixed = self.profile.fixed_s
        if len(self._recent) == WINDOW:
            old_fixed, old_rest, old_seconds = self._recent[0]
            left = bisect_left(self._sorted, self._over_line(old_fixed, old_rest, old_seconds))
            del self._sorted[min(left, len(self._sorted) - 1)]
        self._recent.append((fixed, self.profile.mean(step) - fixed, seconds))
        insort(self._sorted, self._over_line(*self._recent[-1]))
        if self._seen % CORRECTED_EVERY == 0:
            self._correct()
        self.margin = self._margin()

    def _over_line(self, fixed: float, rest: float, seconds: float) -> float:
        return seconds / (self._factors[0] * fixed + self._factors[1] * rest)

    def _correct(self) -> None:
        """Least squares on the relative error, pulled to the median ratio where it tells nothing.

        One factor is not enough: on a device that two engines share, what every step has to load
        anew is the fixed part.
        """
        fixed, rest, seconds = np.array(self._recent).T
        middle = float(np.median(seconds / (fixed + rest)))
        rows = np.stack([fixed, rest], 1) / seconds[:, None]
        pull = PULL * np.eye(2)
        with_pull = rows.T @ rows + pull
        factors = np.linalg.solve(with_pull, rows.sum(0) + pull @ (middle, middle))
        by_fixed, by_rest = np.clip(factors, middle / FARTHEST, middle * FARTHEST).tolist()
        self._factors = by_fixed, by_rest
        self.error = abs(middle - 1.0)
        profile = self.profile
        self.line = replace(
            profile,
            fixed_s=by_fixed * profile.fixed_s,
            per_prefill_s=by_rest * profile.per_prefill_s,
            per_decode_s=by_rest * profile.per_decode_s,
            per_context_s=by_rest * profile.per_context_s,
        )
        self._sorted = sorted((seconds / (by_fixed * fixed + by_rest * rest)).tolist())

    def _ratio(self, quantile: float, otherwise: float) -> float:
        if not self._sorted:
            return otherwise
        return self._sorted[min(len(self._sorted) - 1, int(quantile * len(self._sorted)))]

    @property
    def coverage(self) -> float:
        return self._covered / self._seen if self._seen else 1.0
