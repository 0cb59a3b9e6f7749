"""Who gets how much of a device that two engines want: the live admission rule, asked by a model.

The rule (`executor.admission`) says how long the next rollout step may take. Here it is asked with
facts as a serving engine would publish them, made from the simulated queue with the same `bounds`.
Asking is dear and situations repeat, so they are sorted into classes (`_classed`) and answers are
kept: the same class has the same answer, whoever asks first.

    serving idle        rollout has the device; its steps are as long as the rule lets them be
    both, preemption    serving has it
    both, no preemption the rule lets a rollout step of `r` seconds begin after every `k` steps of
                        serving, when those have run ahead enough: then of `k * s + r` seconds
                        serving has `k * s`, and never less than half: while both have a step on the
                        device they take turns
    both, paced         the rule says until when rollout steps may begin after a serving step; one
                        executor for both engines lets serving's next step wait for that long
    no rule             half each; with a static split always half, whoever else has work
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from rose.executor import admission
from rose.executor.admission import CHUNK, Question, Terms, Window
from rose.executor.bounds import Queue, bounds
from rose.executor.facts import ServingFacts
from rose.executor.latency import Step
from rose.executor.slo import Slo
from rose.plan.engine import Engine, EngineModel
from rose.plan.roofline import Latency

GIVE_BACK_S = 0.02
"""Until memory that serving wants is its own, once a rollout step has ended: what reclaims took at
most beyond their step (docs/benchmarks.md), as here they take no time."""
MOST_LEAD = 32
"""Serving steps that may run ahead before a rollout step: credit is capped long before."""
FEW = 16
"""Requests up to which each count is a class of its own; beyond, eight classes to a doubling."""
PERCENTS = (25, 62, 82, 93, 98)
ALONE, NOBODY = 1.0, 0.0


class Shares(NamedTuple):
    """Of the device's speed while both engines have work, and how large rollout's steps may be."""

    serving: float
    rollout: float
    tokens: int
    """Of a rollout step; 0: none may begin."""
    risk: float = 0.0
    """Serving requests that such a step makes late, in expectation."""


SHUT = Shares(ALONE, NOBODY, 0)


@dataclass(frozen=True)
class Prompts:
    """What a serving engine knows of those that come."""

    percentiles: tuple[int, ...]
    """At `PERCENTS`."""
    worst: int
    """The 99th."""
    per_s: float
    """Arrivals."""


class _Likely(NamedTuple):
    """For sums over many requests, where bounds would overstate."""

    latency: Latency

    def upper(self, step: Step) -> float:
        return self.latency.likely(step)


class Sharing:
    """One for all devices that are alike."""

    def __init__(
        self,
        terms: Terms,
        slo: Slo,
        serving: EngineModel,
        rollout: EngineModel,
        prompts: Prompts,
        *,
        credit_s: float,
        slowdown: float = 1.0,
        paced: bool = False,
    ) -> None:
        """`slo` is what may be lent from; `slowdown`: of both engines while they take turns;
        `paced`: serving's decoding waits while the rule lets rollouts run."""
        self.terms, self.slo = terms, slo
        self._serving, self._rollout, self._prompts = serving, rollout, prompts
        self._credit_s, self._slowdown, self._paced = credit_s, slowdown, paced
        unit = Step(0, 1, 0)
        self._likely = rollout.latency.likely(unit) / rollout.latency.upper(unit)
        self._known: dict[tuple[int, ...], Shares] = {}
        self._queues: dict[Queue, ServingFacts] = {}
        self._idle: dict[tuple[int, bool], Window] = {}
        """By allowance and `lacks`: while nobody is served, nothing else decides."""
        self.newcomer = prompts.worst * serving.kv_bytes if terms.rule == "rose" else None
        """Bytes of a worst-case new request; None: the rule does not look at memory."""

    def of(
        self,
        serving: Engine,
        rollout: Engine,
        *,
        due_s: float,
        allowance: float,
        patient: bool,
        lacks: bool = False,
    ) -> Shares:
        """`due_s`: until the first token of the longest waiting request is due; `patient`: serving
        has been busy for as long as `patience`; `lacks`: memory that it may soon need."""
        if self.terms.rule in ("share_all", "static_split"):
            return self._halves(serving, rollout)
        running, waiting = len(serving.ending), len(serving.waiting)
        turns = len(rollout.ending)
        if (running or waiting) and self._surely_shut(waiting, turns, patient):
            return SHUT
        key = (
            _classed(running),
            _classed(waiting),
            _classed(serving.prompts),
            _classed(serving.context),
            _classed(turns),
            _classed(rollout.context),
            min(64, int(64 * max(0.0, due_s) / self.slo.ttft_s)) if waiting else -1,
            int(64 * min(1.0, allowance)),
            patient or self._paced,
            lacks,
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._ask(*key)
        return found

    def _surely_shut(self, waiting: int, turns: int, patient: bool) -> bool:
        """While serving is busy: what the rule would say without looking at any time. Most
        questions are of this kind, and no two of them alike."""
        if self.terms.preempt_s is not None:
            return True
        if self._paced:
            return waiting > 0
        return self.terms.rule == "rose" and turns > 0 and not patient

    def _halves(self, serving: Engine, rollout: Engine) -> Shares:
        """A fixed half has nobody else's time, and gives none away."""
        tokens = CHUNK + len(rollout.ending)
        if self.terms.rule == "static_split":
            return Shares(0.5, 0.5, tokens)
        if serving.busy:
            both = (1 + serving.weight) * self._slowdown
            return Shares(serving.weight / both, 1 / both, tokens)
        return Shares(NOBODY, ALONE, tokens)

    def patience(self, rollout: Engine) -> float:
        """Seconds that serving must have been busy for before its requests' slack is lent."""
        return admission.PATIENCE * self._worth(len(rollout.ending), rollout.context)

    def _worth(self, turns: int, context: int) -> float:
        return self._rollout.latency.upper(Step(0, turns, context))

    def _ask(
        self,
        running: int,
        waiting: int,
        prompts: int,
        context: int,
        turns: int,
        turns_context: int,
        due: int,
        allowance: int,
        patient: int,
        lacks: int,
    ) -> Shares:
        """Of a class, by its representatives."""
        n, w, p, c, t, tc = map(
            _representative, (running, waiting, prompts, context, turns, turns_context)
        )
        queue = Queue(n, w, p, c)
        facts = self._queues.get(queue)
        if facts is None:
            facts = self._queues[queue] = self._facts(queue)
        if due >= 0:
            facts = replace(facts, prefill_deadline=due / 64 * self.slo.ttft_s)
        if lacks:
            facts = replace(facts, kv_lacks=1)
        if not (n or w):
            idle = self._idle.get((allowance, bool(lacks)))
            if idle is None:
                idle = admission.window(self._question(facts, 0.0, allowance, 0.0, 1))
                self._idle[allowance, bool(lacks)] = idle
            return self._answer(idle, queue, t, tc, 1)
        worth = self._worth(t, tc)
        if self._paced:
            return self._pace(self._question(facts, 0.0, allowance, worth, 1), queue, t, tc)
        step_s = self._serving.latency.mean(Step(min(p, self._serving.budget), n, c))
        ahead = self.slo.tpot_s - step_s
        for steps in range(1, MOST_LEAD + 1):
            lead = min(self._credit_s, (steps - 1) * ahead)
            window = admission.window(self._question(facts, lead, allowance, worth, patient))
            answer = self._answer(window, queue, t, tc, steps)
            if answer.tokens or ahead <= 0 or lead >= self._credit_s or w or not n:
                return answer  # a lead is of no use beside one who has no token yet, see (4)
        return SHUT

    def _question(
        self, facts: ServingFacts, lead: float, allowance: int, worth: float, patient: int
    ) -> Question:
        """Just after a serving step, its requests ahead of their pace by `lead`."""
        if facts.running:
            pace = self.slo.tpot_s
            facts = replace(facts, decode_deadline=pace + lead, tight_decode_deadline=pace)
        return Question(
            facts,
            self.terms,
            0.0,
            allowance=allowance / 64,
            likely=self._likely,
            worth_s=worth,
            busy_s=math.inf if patient else 0.0,
            give_back_s=GIVE_BACK_S,
        )

    def _answer(self, window: Window, queue: Queue, turns: int, context: int, steps: int) -> Shares:
        """What a window means: tokens that fit, and how the device is shared in the long run."""
        tokens = self._fitting(window.seconds, turns, context)
        if not tokens:
            return SHUT
        took = Step(tokens - turns if tokens > turns else 0, min(turns, tokens), context)
        length = self._rollout.latency.mean(took)
        risk = window.risk(self._rollout.latency.upper(took))
        if not (queue.decode or queue.starting):
            return Shares(NOBODY, ALONE, tokens, risk)
        chunk = min(queue.prefill, self._serving.budget)
        step_s = self._serving.latency.mean(Step(chunk, queue.decode, queue.context))
        served = max(steps * step_s, length)
        both = (served + length) * self._slowdown
        return Shares(served / both, length / both, tokens, risk)

    def _pace(self, asked: Question, queue: Queue, turns: int, context: int) -> Shares:
        """Prompts first; tokens when they are due."""
        window = admission.window(asked)
        tokens = self._fitting(window.seconds, turns, context)
        if queue.starting or not tokens or window.until <= 0:
            return SHUT
        served = self._serving.latency.mean(Step(0, queue.decode, queue.context))
        both = (served + window.until) * self._slowdown
        return Shares(served / both, window.until / both, tokens)

    def _fitting(self, seconds: float, turns: int, context: int) -> int:
        """Tokens of a step within its bound: all turns and some prompts, or as many as fit."""
        upper = self._rollout.latency.upper
        if seconds == math.inf:
            return turns + CHUNK
        if seconds <= 0 or upper(Step(1 if not turns else 0, min(1, turns), 0)) > seconds:
            return 0
        low, high = (0, CHUNK) if upper(Step(0, turns, context)) <= seconds else (-turns, 0)
        while high - low > 8:
            middle = (low + high) // 2
            took = Step(max(0, middle), turns + min(0, middle), context)
            low, high = (middle, high) if upper(took) <= seconds else (low, middle)
        return max(0, turns + low)

    def _facts(self, queue: Queue) -> ServingFacts:
        """Without deadlines."""
        slo, latency = self.slo, self._serving.latency
        budget, prompts = self._serving.budget, self._prompts
        busy = queue.decode or queue.starting
        next_s, clear_s = bounds(queue, latency, budget, slo.tpot_s) if busy else (0.0, 0.0)
        given: dict[str, Any] = {}
        if self.terms.rule == "rose":  # no other looks at requests that may come
            given["next_step_with_new_s"], given["clear_with_new_s"] = bounds(
                queue.joined_by(prompts.worst), latency, budget, slo.tpot_s
            )
            after = Queue(
                queue.decode + 1, queue.starting, queue.prefill, queue.context + prompts.worst
            )
            given["next_step_after_new_s"], _ = bounds(after, latency, budget, slo.tpot_s)
            for percent, prompt in zip(PERCENTS, prompts.percentiles, strict=True):
                joined = queue.joined_by(prompt)
                step, clear = bounds(joined, _Likely(latency), budget, slo.tpot_s)
                given |= {f"next_new_{percent}_s": step, f"clear_new_{percent}_s": clear}
        return ServingFacts(
            running=queue.decode,
            waiting=queue.starting,
            next_step_s=next_s,
            clear_s=clear_s,
            base_s=latency.mean(Step(1, queue.decode, queue.context)),
            arrival_rate=prompts.per_s,
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            **given,
        )


def _classed(count: int) -> int:
    """A class of like counts, wider the more there are."""
    if count < FEW:
        return count
    doublings = math.log2(count / FEW)
    return FEW + int(8 * doublings)


def _representative(of_class: int) -> int:
    """The largest of its class, so that bounds hold for all of it."""
    if of_class < FEW:
        return of_class
    return math.ceil(FEW * 2 ** ((of_class - FEW + 1) / 8)) - 1
