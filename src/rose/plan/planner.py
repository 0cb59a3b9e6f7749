"""What would a fleet gain, and is its p99 safe? Systems side by side, then what to set.

All systems are simulated on the same arrivals and trajectories. `max_borrowed` is the least number
of devices that comes within `NEARLY` of the best throughput while serving keeps its promise;
`headroom` the least share of memory with which it does. Sensitivities change one thing at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rose.plan.job import alone, simulate
from rose.plan.money import Prices, Usage, cost_per_correct, cost_per_step, opportunistic_parts
from rose.plan.outcome import Outcome
from rose.plan.progress import Say, quiet
from rose.plan.scenario import Scenario
from rose.plan.sync import Links
from rose.plan.system import System
from rose.plan.systems import SYSTEMS
from rose.plan.systems.rose import ROSE
from rose.plan.training import weights
from rose.plan.workload.quantiles import Quantiles

NEARLY = 0.95
"""Of the best throughput: the last devices borrowed add least, and each is a risk to serving."""
KEPT = 0.99
"""Share of requests that must keep their promise: it is one about a 99th percentile."""
SHARES = (0.25, 0.5, 0.75, 1.0)
HEADROOMS = (0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Answer:
    max_borrowed: int
    headroom: float
    safe: bool
    """Serving keeps its promise with that."""
    why: str


@dataclass
class Plan:
    scenario: Scenario
    serving_alone: Outcome
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    borrowed: dict[int, Outcome] = field(default_factory=dict)
    """rose by how many devices may be borrowed."""
    headrooms: dict[float, Outcome] = field(default_factory=dict)
    sensitivity: dict[str, dict[str, float]] = field(default_factory=dict)
    money: dict[str, dict[str, float]] = field(default_factory=dict)
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of the opportunistic line."""
    answer: Answer | None = None

    @property
    def fixed(self) -> Outcome:
        return self.outcomes["fixed"]

    @property
    def warnings(self) -> list[str]:
        """What in the numbers is not to be trusted."""
        found, users_s = [], self.scenario.longest_s
        for name, one in self.outcomes.items():
            says = f"{SYSTEMS[name].says}: likely too fast."
            if not one.steady:
                found.append(
                    f"{says} Steps were counted though the longest of the first trajectories had "
                    f"not ended after {one.began_s:,.0f} s"
                )
            ended_s = one.began_s + sum(step.seconds for step in one.steps)
            if one.attainment is not None and ended_s > users_s:
                found.append(
                    f"{says} It takes {ended_s:,.0f} s, and users are simulated for "
                    f"{users_s:,.0f} s: ask for fewer steps"
                )
        return found


def plan(
    scenario: Scenario,
    prices: Prices,
    *,
    accept_rate: float,
    reasoning_multiplier: float = 1.0,
    systems: Sequence[System] = tuple(SYSTEMS.values()),
    say: Say = quiet,
) -> Plan:
    say("serving alone")
    found = Plan(scenario, alone(scenario, scenario.alone_s))
    for system in systems:
        found.outcomes[system.name] = simulate(scenario, system, say(system.says))
    for share in SHARES:
        count = max(1, round(share * scenario.lendable))
        progress = say(f"at most {count} devices borrowed")
        found.borrowed[count] = simulate(replace(scenario, lendable=count), ROSE, progress)
    for headroom in HEADROOMS:
        other = replace(scenario, serving=replace(scenario.serving, headroom=headroom))
        found.headrooms[headroom] = simulate(other, ROSE, say(f"headroom {headroom:.0%}"))
    for name, other in variations(scenario).items():
        fixed = simulate(other, SYSTEMS["fixed"])
        found.sensitivity[name] = _compared(simulate(other, ROSE, say(name)), fixed)
    found.answer = _answer(found)
    for name, outcome in found.outcomes.items():
        found.money[name] = _money(
            scenario, SYSTEMS[name], outcome, found.serving_alone, prices, accept_rate,
            reasoning_multiplier,
        )  # fmt: skip
        whole = usage(
            scenario, SYSTEMS[name], outcome, found.serving_alone, trainers=scenario.trainers
        )
        found.parts[name] = opportunistic_parts(whole, prices)
    return found


def variations(scenario: Scenario) -> dict[str, Scenario]:
    """What if."""
    serving, job, links = scenario.serving, scenario.job, scenario.links
    slower = Quantiles(tuple((share, 2 * value) for share, value in job.law.tool_s.rows))
    return {
        "as it is": scenario,
        "traffic doubles": replace(scenario, serving=replace(serving, rate=2 * serving.rate)),
        "tools take twice as long": replace(
            scenario, job=replace(job, law=replace(job.law, tool_s=slower))
        ),
        "links 10 times slower": replace(scenario, links=Links(links[0] / 10, links[1] / 10)),
    }


def _compared(rose: Outcome, fixed: Outcome) -> dict[str, float]:
    return {
        "throughput_vs_fixed": rose.throughput / fixed.throughput,
        "slo_attainment": rose.attainment or 0.0,
        "ttft_p99_s": rose.p99("ttft"),
        "tpot_p99_s": rose.p99("tpot"),
    }


def _answer(found: Plan) -> Answer:
    safe = {n: o for n, o in found.borrowed.items() if (o.attainment or 0.0) >= KEPT}
    rooms = [h for h, o in found.headrooms.items() if (o.attainment or 0.0) >= KEPT]
    headroom = min(rooms, default=max(HEADROOMS))
    if not safe:
        return Answer(0, headroom, False, "serving misses its promise however few are borrowed")
    best = max(o.throughput for o in safe.values())
    count = min(n for n, o in safe.items() if o.throughput >= NEARLY * best)
    gain = safe[count].throughput / found.fixed.throughput
    return Answer(count, headroom, True, f"{gain:.2f} x the fixed fleet; more add under 5 %")


def _money(
    scenario: Scenario,
    system: System,
    outcome: Outcome,
    serving_alone: Outcome,
    prices: Prices,
    accept_rate: float,
    reasoning_multiplier: float,
) -> dict[str, float]:
    """Of one step, trainers included, and of one correct answer, by price line."""
    steps = len(outcome.steps)
    sampled = sum(step.trajectories for step in outcome.steps) / steps
    needed = scenario.job.demand.prompts * scenario.job.demand.samples
    whole = usage(scenario, system, outcome, serving_alone, trainers=scenario.trainers)
    rollouts = usage(scenario, system, outcome, serving_alone, trainers=0)
    found = {f"step_{line}": cost for line, cost in cost_per_step(whole, prices).items()}
    for line, cost in cost_per_step(rollouts, prices).items():
        found[f"correct_{line}"] = cost_per_correct(
            cost / sampled, reasoning_multiplier, sampled / needed - 1.0, accept_rate
        )
    return found


def usage(
    scenario: Scenario, system: System, outcome: Outcome, serving_alone: Outcome, *, trainers: int
) -> Usage:
    """Of one step. A serving device that nobody borrows needs no headroom: whatever is free is
    serving's at once. While it is lent that share of its memory stays empty for serving's sake, so
    the loan pays for it. Whole devices, of spot markets or trainers, keep nothing for anybody."""
    steps, tp = len(outcome.steps), scenario.tp
    wall = sum(step.seconds for step in outcome.steps) / steps
    requests = len(outcome.ttft) / steps
    late = max(0.0, (serving_alone.attainment or 1.0) - (outcome.attainment or 1.0))
    kept = scenario.serving.headroom if system.borrows == "serving" else 0.0
    sent = weights(scenario, system).wan_s * scenario.links.wan_bytes_per_s
    return Usage(
        dedicated_gpu_s=(scenario.dedicated + trainers) * tp * wall,
        borrowed_used_gpu_s=outcome.device_s * tp / steps,
        borrowed_held_gpu_s=outcome.lent_s * tp / steps,
        wan_bytes=sent if system.borrows in ("serving", "idle") else 0.0,
        headroom_gpu_s=kept * outcome.lent_s * tp / steps,
        wall_s=wall,
        extra_violations=late * requests,
        requests=requests,
        correct=0.0,
    )
