"""Engines and lending as rose's nodes have them on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from rose.bench.arrivals import Request
from rose.executor.admission import Terms
from rose.executor.latency import QUANTILE, Profile
from rose.executor.slo import Slo
from rose.models import kv_bytes_per_token, resolve
from rose.plan.device import Device
from rose.plan.engine import EngineModel
from rose.plan.jitter import Jitter
from rose.plan.roofline import Measured
from rose.plan.sharing import PERCENTS, Prompts, Sharing
from rose.plan.workload.rollouts import Trajectories

ROLLOUT_TOKENS, BLOCK = 512, 32
"""Of a rollout step and of a KV block, as `cluster.engine` starts engines."""
CREDIT_S, MARGIN = 2.0, 0.1
PREEMPT_S = 0.0005
"""Until serving overtakes a rollout step on a CPU core: beside an idle-class thread others wake
0.06 ms late in the median, 0.1 to 0.8 in the P99."""


def engine(
    profile: Profile, model: str, tokens: int, sequences: int, *, longer_s: float = 0.0,
    token_s: float = 0.0, slowdown: float = 1.0, quantile: float = QUANTILE, seed: int = 0,
) -> EngineModel:  # fmt: skip
    """`longer_s`, `token_s`, `slowdown`: by how much, by how much for each token that they make and
    by what factor steps are longer than profiled."""
    profile = replace(
        profile,
        fixed_s=max(0.0, profile.fixed_s + longer_s),
        per_decode_s=profile.per_decode_s + token_s,
    )
    kv, jitter = kv_bytes_per_token(resolve(model)), Jitter(profile, seed)
    law = Measured(profile, slowdown, quantile=quantile)
    return EngineModel(law, kv, tokens, sequences, BLOCK, jitter, sends_s=token_s)


def lending(
    terms: Terms, slo: Slo, serving: EngineModel, rollout: EngineModel, requests: Sequence[Request],
    rate: float,
) -> Sharing:  # fmt: skip
    """`requests`: from which a serving engine knows how long prompts are."""
    drawn = [one.prompt_tokens for one in requests] or [1]
    percentiles = tuple(int(q) for q in np.percentile(drawn, PERCENTS))
    prompts = Prompts(percentiles, int(np.percentile(drawn, 99)), rate)
    lendable = Slo(slo.ttft_s * (1 - MARGIN), slo.tpot_s * (1 - MARGIN))
    return Sharing(terms, lendable, serving, rollout, prompts, credit_s=CREDIT_S)


def lent(
    number: int, serving: EngineModel, rollout: EngineModel, kv_total: int, sharing: Sharing
) -> Device:
    device = Device(number, serving=serving, rollout=rollout, kv_total=kv_total, sharing=sharing)
    device.active = False
    return device


def recorded_turns(turns: Iterable[Sequence[tuple[int, int, float]]]) -> Trajectories:
    """Trajectories that were recorded; of each turn the tokens that it hears and says, and the
    seconds before it."""
    ones = [list(one) for one in turns]
    flat = [turn for one in ones for turn in one]
    offset = np.concatenate(([0], np.cumsum([len(one) for one in ones]))).astype(np.int64)
    following = [turn for one in ones for turn in (*one[1:], (0, 0, 0.0))]
    return Trajectories(
        group=np.arange(len(ones)),
        prompt=np.array([one[0][0] for one in ones], np.int64),
        offset=offset,
        output=np.array([said for _, said, _ in flat], np.int64),
        observation=np.array([heard for heard, _, _ in following], np.int64),
        tool_s=np.array([before for _, _, before in following], np.float64),
    )
