"""Shipped laws by name, fitted to public traces and papers; tests hold them against the traces.

Traces: Azure 2023 chat (AzurePublicDataset, Patel et al., Splitwise, CC BY 4.0), ServeGen (Xiang et
al., Apache-2.0), TraceLab's tables (SyFI Lab, University of Washington, CC BY 4.0).
"""

from dataclasses import dataclass

from rose.bench.arrivals import LogNormal
from rose.plan.workload.laws import Copied, Diurnal, GammaBursts, Law, Noisy
from rose.plan.workload.quantiles import Quantiles
from rose.plan.workload.rollouts import Rollouts
from rose.plan.workload.serving import Sizes


@dataclass(frozen=True)
class Service:
    """One stream of requests; `rate` is the one at which the law was fitted."""

    law: Law
    sizes: Sizes
    rate: float

    @property
    def everywhere(self) -> Copied:
        """For many devices: each sees the law as it was fitted, all at the same time."""
        return Copied(self.law, self.rate)


SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)


def _lengths(tokens: tuple[int, ...]) -> Quantiles:
    """The lengths that these shares of a trace's requests do not exceed."""
    return Quantiles(tuple(zip(SHARES, tokens, strict=True)))


AZURE_CHAT = Service(
    Noisy(0.26, 280.0, GammaBursts(1.06)),
    Sizes(
        _lengths(
            (29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6212, 14050)
        ),
        _lengths((16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000)),
    ),
    rate=5.53,
)
"""Azure 2023 chat, one hour: nearly Poisson from second to second, on a rate that drifts by a
quarter within minutes."""

SERVEGEN_LARGE = Service(
    Noisy(0.65, 600.0, Noisy(1.0, 1.0, GammaBursts(1.7))),
    Sizes(
        _lengths((61, 82, 419, 575, 582, 589, 614, 829, 835, 842, 878, 1659, 3477, 6644, 24618)),
        _lengths((1, 2, 3, 14, 15, 15, 29, 40, 46, 63, 98, 319, 588, 951, 4166)),
    ),
    rate=4.0,
)
"""ServeGen m-large, two hours at 4 requests/s: bursts of about a second, on a rate that jumps every
ten minutes. Counts in windows of a second and more are the trace's; single gaps vary more, by 2.8
times their mean where the trace has 1.9."""

SERVEGEN_DAYS = Diurnal(0.72, 1.4, base=Noisy(0.25, 3600.0))
"""ServeGen m-small, 14 days in windows of ten minutes: hours of the day from 0.66 to 1.46 of the
mean, part of it a level that changes every hour. The trace has a weaker wave of half a day too."""

AGENTIC = Rollouts(
    # As `rose.bench.trajectories` draws them.
    prompt=LogNormal(1000, 1.0, 16_000),
    # TraceLab, steps that tools initiate in a request, and one more: p50 1, p90 20, p99 86; the top
    # such that their mean is 7.8.
    turns=Quantiles(((0.25, 1), (0.5, 2), (0.9, 21), (0.99, 87), (1, 131))),
    # TraceLab, output tokens of a step: median 214; seconds of generation p90 20.2 and p99 78 at
    # 40.7 tokens/s.
    output=LogNormal(214, 1.12, 16_000),
    # TraceLab, tokens appended in a step: median 875, less the output before; spread as recorded.
    observation=LogNormal(660, 1.2, 16_000),
    # TraceLab, seconds of tools in a step: p50 0.1, p90 10, p99 192; the top such that their mean
    # is 16.8.
    tool_s=Quantiles(((0.5, 0.1), (0.9, 10.0), (0.99, 192.0), (1, 3070.0))),
    # A guess: nobody publishes how alike the samples of a prompt are.
    alike=0.5,
    # So that tokens per step are the table's, most steps being of hard trajectories.
    steady=0.0,
    context=131_072,
)

FROZEN_LAKE = Rollouts(
    # ROSE (8B) names the game; what has no source below is a guess.
    prompt=LogNormal(350, 0.1, 1024),
    # ROLL's example: 10 actions at most; 4x4 lakes take 6 at best and end early in a hole.
    turns=Quantiles(((0, 1), (0.1, 2), (0.5, 5), (0.9, 10), (1, 10))),
    # Set such that ROSE's tail and duration come out: 75 % done in 30 % of it, the last after about
    # 490 s at 25 ms per token.
    output=LogNormal(400, 0.8, 4096),
    observation=LogNormal(80, 0.2, 256),
    # A move of the game takes milliseconds.
    tool_s=Quantiles(((0.5, 0.005), (0.99, 0.02))),
    alike=0.5,
    steady=0.4,
    context=32_768,
)

ALFWORLD = Rollouts(
    # ROSE (32B) names the game; what has no source below is a guess.
    prompt=LogNormal(700, 0.2, 2048),
    # verl-agent: tasks take up to 50 steps.
    turns=Quantiles(((0, 4), (0.25, 10), (0.5, 15), (0.9, 35), (0.97, 50), (1, 50))),
    # Set as above: the last after about 960 s at 45 ms per token.
    output=LogNormal(220, 0.4, 4096),
    observation=LogNormal(60, 0.5, 1024),
    # A text world answers in tenths of a second, and slower where many share a host.
    tool_s=Quantiles(((0.5, 0.1), (0.9, 0.5), (0.99, 3.0))),
    alike=0.5,
    steady=0.2,
    context=32_768,
)

SERVICES = {"azure_chat": AZURE_CHAT, "servegen_large": SERVEGEN_LARGE}
ROLLOUTS = {"agentic": AGENTIC, "frozen_lake": FROZEN_LAKE, "alfworld": ALFWORLD}
