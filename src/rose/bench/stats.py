"""What one request measured and what many say together: pure arithmetic, no I/O.

Latency counts from the *scheduled* arrival, so a stalled server cannot hide its delay by slowing
the generator (no coordinated omission). A request meets its SLO when it answered without error,
its first token came within `ttft_s` and its mean time per output token is within `tpot_s`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil

import numpy as np

from rose.executor.slo import Slo

P99_SAMPLES = 100
"""Below this many samples a p99 is simply the worst one, and the summary says so."""

RESAMPLED = 2000


@dataclass(frozen=True)
class Sample:
    """One request's times in seconds since the run began."""

    index: int
    scheduled_s: float
    sent_s: float
    finish_s: float
    prompt_tokens: int
    output_tokens: int
    token_s: tuple[float, ...] = ()
    """Arrival of every token; tokens of one chunk share a time."""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def lag_s(self) -> float:
        """How late the generator itself was."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.scheduled_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        if self.output_tokens < 2 or not self.token_s:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def max_gap_s(self) -> float | None:
        return max((b - a for a, b in pairwise(self.token_s)), default=None)

    def since(self, begin_s: float) -> "Sample":
        """With times that count from `begin_s`."""
        return replace(
            self,
            scheduled_s=self.scheduled_s - begin_s,
            sent_s=self.sent_s - begin_s,
            finish_s=self.finish_s - begin_s,
            token_s=tuple(at - begin_s for at in self.token_s),
        )

    def meets(self, slo: Slo) -> bool:
        if self.error is not None or self.ttft_s is None or self.ttft_s > slo.ttft_s:
            return False
        return self.tpot_s is None or self.tpot_s <= slo.tpot_s


@dataclass(frozen=True)
class Percentiles:
    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    worst: float
    p99_is_worst_of: int | None
    """The sample count when it is too small for a p99, which then is the worst sample."""


@dataclass(frozen=True)
class Summary:
    """One load run; times in seconds."""

    slo: Slo
    requests: int
    """Finished or failed; cut and unsent ones are not judged."""
    failed: int
    cut: int
    unsent: int
    attainment: float | None
    span_s: float
    """Until the last answer, so longer than the schedule."""
    rate: float
    """Requests judged per second of the span."""
    output_tokens: int
    tokens_per_s: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    max_gap: Percentiles | None
    lag: Percentiles | None
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ratio:
    """A ratio, and the range in which nine of ten of its kind lie."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """Median of repeats with the lowest and highest of them."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def relative(self) -> float:
        """(high - low) / median; 0 when the median is 0."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0


def percentile(ordered: Sequence[float], q: float) -> float:
    """Nearest rank on sorted samples: the smallest one with at least a share q at or below it."""
    if not ordered:
        raise ValueError("percentile of no samples")
    # The rounding keeps 0.7 * 10 = 7.000000000000001 from becoming rank 8.
    return ordered[max(0, ceil(round(q * len(ordered), 9)) - 1)]


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Of the values that exist; None when none does."""
    ordered = sorted(v for v in values if v is not None)
    if not ordered:
        return None
    count = len(ordered)
    few = count < P99_SAMPLES
    return Percentiles(
        count=count,
        mean=sum(ordered) / count,
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p99=ordered[-1] if few else percentile(ordered, 0.99),
        worst=ordered[-1],
        p99_is_worst_of=count if few else None,
    )


def attainment(samples: Sequence[Sample], slo: Slo) -> float | None:
    """Share of requests that met the SLO; failures count against it."""
    return sum(s.meets(slo) for s in samples) / len(samples) if samples else None


def median_and_spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        raise ValueError("median of no values")
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return Spread(median, ordered[0], ordered[-1], len(ordered))


def p99_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """P99 over P99, and where nine of ten such ratios would be if other requests had come.

    By resampling both: a P99 of a few hundred requests rests on two or three of them.
    """
    rng = np.random.default_rng(0)

    def resampled(values: Sequence[float]) -> np.ndarray:
        drawn = rng.choice(np.asarray(values), (RESAMPLED, len(values)))
        p99: np.ndarray = np.quantile(drawn, 0.99, axis=1, method="inverted_cdf")
        return p99

    low, high = np.quantile(resampled(ours) / resampled(theirs), (0.05, 0.95))
    ratio = percentile(sorted(ours), 0.99) / percentile(sorted(theirs), 0.99)
    return Ratio(ratio, float(low), float(high))


def summarise(
    samples: Sequence[Sample], slo: Slo, span_s: float, cut: int = 0, unsent: int = 0
) -> Summary:
    """Latencies are over requests that answered; attainment is over all judged ones."""
    answered = [s for s in samples if s.error is None]
    tokens = sum(s.output_tokens for s in samples)
    return Summary(
        slo=slo,
        requests=len(samples),
        failed=len(samples) - len(answered),
        cut=cut,
        unsent=unsent,
        attainment=attainment(samples, slo),
        span_s=span_s,
        rate=len(samples) / span_s if span_s > 0 else 0.0,
        output_tokens=tokens,
        tokens_per_s=tokens / span_s if span_s > 0 else 0.0,
        ttft=percentiles(s.ttft_s for s in answered),
        tpot=percentiles(s.tpot_s for s in answered),
        max_gap=percentiles(s.max_gap_s for s in answered),
        lag=percentiles(s.lag_s for s in samples),
        errors=dict(Counter(s.error for s in samples if s.error is not None)),
    )
