"""Serving's latency promises, and the deadlines they put on every request.

A request promises its first token `ttft_s` after arrival, and its later tokens at a mean pace of
`tpot_s`. The pace leaves *credit*: a request that has run ahead of it could wait that long and
still keep its promise. `next_token_deadline` lets it lend up to `credit_cap_s` of that credit; with
a cap of 0 it is the rule of the ROSE paper (every single gap within `tpot_s`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slo:
    """P99 promises of a serving engine, in seconds."""

    ttft_s: float
    tpot_s: float


def first_token_deadline(arrival: float, slo: Slo) -> float:
    return arrival + slo.ttft_s


def next_token_deadline(
    first_token: float, last_token: float, emitted: int, slo: Slo, credit_cap_s: float
) -> float:
    """When the next token is due: at the promised pace, and at most the capped credit late.

    `emitted` tokens are out, the last at `last_token`. A request behind its pace gets the earlier,
    harder deadline, possibly one already past: it has nothing to lend.
    """
    on_pace = first_token + emitted * slo.tpot_s
    return min(on_pace, last_token + slo.tpot_s + credit_cap_s)
