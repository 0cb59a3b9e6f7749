"""The worst of every family, the same arrivals under other rules, and what was guaranteed.

Two searches: without preemption, as on a GPU, and with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rose.executor.priority import DEFAULT_DELAY_S
from rose.plan.progress import Say, quiet
from rose.plan.scenario import Scenario
from rose.plan.stress.search import Worst, search
from rose.plan.stress.trial import Bench, Hurt
from rose.plan.systems import SYSTEMS
from rose.plan.systems.rose import ROSE

PREEMPT_S = DEFAULT_DELAY_S
"""Until serving overtakes a rollout step: what a node counts with at least. Its trial on CPU cores
mostly sees less; no GPU has it today."""
PREEMPTED = replace(
    ROSE,
    name="rose_preemption",
    says="rose, steps can be preempted",
    terms=replace(ROSE.terms, preempt_s=PREEMPT_S),
)
OTHERS = (PREEMPTED, SYSTEMS["rose_published"], SYSTEMS["share_all"])


@dataclass(frozen=True)
class Report:
    scenario: Scenario
    tries: int
    seed: int
    worst: dict[str, Worst]
    preempted: dict[str, Worst]
    """Arrivals that are worst with preemption."""
    others: dict[str, dict[str, Hurt]]
    """By family and system, on the arrivals that are worst for rose."""

    @property
    def held(self) -> bool:
        """What is guaranteed, with preemption and without."""
        every = (*self.worst.values(), *self.preempted.values())
        return not any(one.hurt.single_beyond for one in every)

    def rules(self, one: Worst) -> dict[str, Hurt]:
        """By system, what these arrivals do: first rose, for which they are the worst."""
        return {ROSE.name: one.hurt, **self.others[one.pattern.family]}


def run(scenario: Scenario, tries: int, seed: int, say: Say = quiet) -> Report:
    if not scenario.lendable:
        raise ValueError("devices.lendable is 0: nothing is lent, so nothing can be hurt")
    bench = Bench(scenario)
    worst, preempted = (search(bench, system, tries, seed, say) for system in (ROSE, PREEMPTED))
    others: dict[str, dict[str, Hurt]] = {}
    for family, one in worst.items():
        others[family] = {}
        for system in OTHERS:
            say(f"{system.says}: {family}")
            others[family][system.name] = bench.trial(one.pattern, system, timed_by=ROSE)
    return Report(scenario, tries, seed, worst, preempted, others)


def result(report: Report) -> dict[str, Any]:
    hurts = [one.hurt for one in report.worst.values()]
    slo = report.scenario.serving.slo
    return {
        "bench": "plan stress",
        "settings": {
            "fleet": report.scenario.name,
            "tries": report.tries,
            "seed": report.seed,
            "ttft_s": slo.ttft_s,
            "tpot_s": slo.tpot_s,
            "error_budget": ROSE.terms.error_budget,
        },
        "modes": {
            family: {
                "pattern": asdict(one.pattern),
                "within": one.hurt.within,
                "rose": asdict(one.hurt),
            }
            | {name: asdict(hurt) for name, hurt in report.others[family].items()}
            for family, one in report.worst.items()
        },
        "with_preemption": {
            family: {"pattern": asdict(one.pattern), "within": one.hurt.within} | asdict(one.hurt)
            for family, one in report.preempted.items()
        },
        "ratios": {
            "added_late_share_max": max(h.added_late / h.requests for h in hurts),
            "ttft_excess_max_s": max(h.ttft_excess_s for h in hurts),
            "tpot_excess_max_s": max(h.tpot_excess_s for h in hurts),
            "granted_step_max_s": max(h.step_s for h in hurts),
            "one_unseen_excess_max_s": max(h.single_excess_s for h in hurts),
            "preemption_s": PREEMPT_S,
            "preemption_excess_max_s": max(w.hurt.ttft_excess_s for w in report.preempted.values()),
            "guarantee_held": report.held,
        },
    }
