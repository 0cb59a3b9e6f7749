"""What an RL step and a correct answer cost, under three price lines.

    dedicated       all rollouts on rented devices
    opportunistic   what borrowing adds to the bill: power of idle time used, weights over the WAN,
                    headroom that serving keeps because of the loan, the scheduler, and the SLO
                    penalties that lending is expected to cause
    serving         borrowed devices at the price for which serving could be sold, held or used

Devices that the job has of its own cost the dedicated price in all three. Prices are US dollars of
an H100; only their ratios matter for which line is lowest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

HOUR = 3600.0
GB = 1e9


class Line(StrEnum):
    DEDICATED = "dedicated"
    OPPORTUNISTIC = "opportunistic"
    SERVING = "serving"


@dataclass(frozen=True)
class Prices:
    dedicated_per_gpu_h: float = 3.0
    """Assumed: H100 SXM on demand at GPU clouds, $2.5 to 3.5 in public price lists of May 2026."""
    serving_per_gpu_h: float = 4.0
    """Assumed: the same at hyperscalers, $3.5 to 5.0, as people pay who sell an SLO."""
    idle_marginal_share: float = 0.03
    """Of the serving price, for a second that would have been idle: 700 W (datasheet) less 124
    (reported idle with a model loaded), times 1.2 for cooling, at $0.12 per kWh: 8 cents an hour,
    and something for wear."""
    wan_per_gb: float = 0.02
    """AWS, list price between regions of the US, and from there to Europe."""
    scheduler_per_h: float = 0.17
    """Four cores: AWS c6i.xlarge, list price."""
    penalty_per_violation: float = 0.01
    """Assumed: ten times the price of an answer of 1,000 tokens at $1 a million. An operator has a
    contract instead."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _from_zero(name, value)


@dataclass(frozen=True)
class Usage:
    """What one RL step used."""

    dedicated_gpu_s: float
    borrowed_used_gpu_s: float
    """In which rollouts computed, in terms of a device of their own."""
    borrowed_held_gpu_s: float
    """From lease to return."""
    wan_bytes: float
    """Of weights, all copies."""
    headroom_gpu_s: float
    """Share of memory that serving kept empty because of the loan, times how long. It would have
    been idle without the loan, as the time that rollouts use, and is priced like it."""
    wall_s: float
    extra_violations: float
    """Serving requests late because of the loan, expected or counted."""
    requests: float
    """Serving requests in that time."""
    correct: float
    """Answers that the verifier accepted."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _from_zero(name, value)
        if self.extra_violations > self.requests:
            raise ValueError(
                f"{self.extra_violations} serving requests cannot be late of {self.requests}."
            )


def opportunity_cost(extra_violations_per_request: float, requests: float, penalty: float) -> float:
    """The expected SLO penalty of lending."""
    for name, value in (
        ("extra_violations_per_request", extra_violations_per_request),
        ("requests", requests),
        ("penalty", penalty),
    ):
        _from_zero(name, value)
    return extra_violations_per_request * requests * penalty


def opportunistic_parts(usage: Usage, prices: Prices) -> dict[str, float]:
    """What the opportunistic line consists of."""
    share = usage.extra_violations / usage.requests if usage.requests else 0.0
    serving_per_s = prices.serving_per_gpu_h / HOUR
    return {
        "dedicated": usage.dedicated_gpu_s * prices.dedicated_per_gpu_h / HOUR,
        "idle": usage.borrowed_used_gpu_s * serving_per_s * prices.idle_marginal_share,
        "transfer": usage.wan_bytes / GB * prices.wan_per_gb,
        "headroom": usage.headroom_gpu_s * serving_per_s * prices.idle_marginal_share,
        "scheduler": usage.wall_s / HOUR * prices.scheduler_per_h,
        "slo_penalty": opportunity_cost(share, usage.requests, prices.penalty_per_violation),
    }


def cost_per_step(usage: Usage, prices: Prices) -> dict[Line, float]:
    parts = opportunistic_parts(usage, prices)
    at_dedicated = usage.borrowed_used_gpu_s * prices.dedicated_per_gpu_h / HOUR
    at_serving = usage.borrowed_held_gpu_s * prices.serving_per_gpu_h / HOUR
    return {
        Line.DEDICATED: parts["dedicated"] + at_dedicated,
        Line.OPPORTUNISTIC: sum(parts.values()),
        Line.SERVING: parts["dedicated"] + at_serving + parts["transfer"] + parts["scheduler"],
    }


def cost_per_correct(
    price_of_rollouts: float, reasoning_multiplier: float, rollout_ratio: float, accept_rate: float
) -> float:
    """price of rollouts x reasoning multiplier x (1 + rollout ratio) / verifier accept rate."""
    _from_zero("price_of_rollouts", price_of_rollouts)
    _from_zero("reasoning_multiplier", reasoning_multiplier)
    _from_zero("rollout_ratio", rollout_ratio)
    if not 0 < accept_rate <= 1:
        raise ValueError(
            f"accept_rate is {accept_rate}; of a verifier it must be above 0 and at most 1."
        )
    return price_of_rollouts * reasoning_multiplier * (1.0 + rollout_ratio) / accept_rate


def cost_per_correct_counted(usage: Usage, prices: Prices) -> dict[Line, float]:
    """Cost of the step over its correct answers; infinite if there are none."""
    return {
        line: cost / usage.correct if usage.correct else math.inf
        for line, cost in cost_per_step(usage, prices).items()
    }


def _from_zero(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be a number from 0 up.")
