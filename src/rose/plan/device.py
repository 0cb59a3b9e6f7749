"""A simulated device: a serving engine, a rollout engine, or both, and what they do to each other.

Both engines' steps share the device by `Sharing`. A serving step begins whenever there is work. A
rollout step begins when the rule lets it. With preemption serving overtakes one that runs, after a
delay that is lost to both. Without, it runs to its end, while serving waits for it half of the
time, as on a device that two processes take turns on. KV memory is split by the live policy
(`executor.memory`), which knows what serving's users come back to (`returning`); turns that lose
theirs are handed back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from rose.executor import memory
from rose.executor.budget import ErrorBudget
from rose.executor.memory import Budget, Demand, MemoryTerms
from rose.executor.peak import Peak
from rose.plan.engine import Engine, EngineModel, Event, Job
from rose.plan.returning import Returning
from rose.plan.sharing import ALONE, NOBODY, SHUT, Shares, Sharing

SLIVER = 1e-9
"""Seconds that are rounding."""


class Done(msgspec.Struct, frozen=True):
    """What a device has to say."""

    served: Sequence[Event]
    rolled: Sequence[Event]
    lost: Sequence[tuple[Job, int]]
    """Turns whose memory was taken, with the tokens they have made."""


class Device:
    def __init__(
        self,
        number: int,
        *,
        serving: EngineModel | None,
        rollout: EngineModel,
        kv_total: int,
        sharing: Sharing | None = None,
        headroom: float = 0.2,
        policy: str = "trim",
    ) -> None:
        self.number = number
        self.serving = Engine(serving) if serving else None
        self.rollout = Engine(rollout)
        self.active = serving is None
        """The rollout engine may run."""
        self.epoch = 0
        """Counts changes: what was foreseen before one is void."""
        self.at = 0.0
        self._sharing = sharing
        self._preempt_s = sharing.terms.preempt_s if sharing else None
        self._memory = MemoryTerms(kv_total, headroom, policy, kv_total)
        self.budget = Budget(kv_total if serving is None else 0)
        self._most_at = -1
        """Serving's need, with warm prefixes, with which the budget is all that it can be: nothing
        more to decide."""
        self.returning: Returning | None = None
        """Serving's users who come back, if any do."""
        self._need = 0
        self._peak = Peak()
        self._most_need = 0
        """What serving has needed lately, when that changed last."""
        self._errors = ErrorBudget(sharing.terms.error_budget if sharing else 0.0)
        self._arrived = 0
        self._arrivals: list[float] = []
        """Of waiting requests, the oldest first."""
        self._shares = SHUT
        self._speeds = (ALONE, ALONE)
        self._busy_since: float | None = None
        self._again = math.inf
        """When the rule may say otherwise though nothing has happened."""
        self.rl_step = 0
        self.serving_s = self.rollout_s = 0.0
        """Device time that each engine has had."""
        self.rolled_tokens = 0
        self.late_expected = 0.0
        self.host = 0.0
        """Seconds of the host's work that are left here."""
        self.stranger = 0.0
        """Share of the time in which somebody else runs here: an engine that is being started."""
        self.longest_s = 0.0
        """That a rollout step which began beside a serving engine may hold it up."""

    # ---- time

    def advance(self, now: float) -> None:
        """Let both engines work until now; nothing may end before."""
        span = now - self.at
        self.at = now
        if self.host:
            took = min(self.host, span / (1 + self._weight + self.stranger))
            self.host -= took
            span -= took
        if self.stranger and (weight := self._weight):
            span *= weight / (weight + self.stranger)
        if span <= 0:
            return
        serving, rollout = self.serving, self.rollout
        fast, slow = self._speeds
        if serving is not None and serving.work:
            serving.work = max(0.0, serving.work - span * fast)
            self.serving_s += span * fast
        if rollout.work:
            rollout.work = max(0.0, rollout.work - span * slow)
            self.rollout_s += span * slow

    def settle(self, now: float) -> Done:
        """What has ended by now, and begin what can begin."""
        served: list[Event] = []
        rolled: list[Event] = []
        serving, rollout = self.serving, self.rollout
        if serving is not None and serving.steps and serving.work <= SLIVER:
            served = serving.done()
            serving.steps = 0
            del self._arrivals[: sum(event.first for event in served)]
            if self.returning is not None:
                for event in served:
                    if not event.first:
                        self.returning.end(event.job, now)
            if served:
                rollout.cut()  # what it was granted rested on who was served
        if rollout.steps and rollout.work <= SLIVER:
            rolled = rollout.done()
            rollout.steps = 0
            self.late_expected += self._shares.risk
            self._errors.spend(self._shares.risk)
        lost = self._split(now)
        if serving is not None and self.returning is not None:
            room = self._memory.total - self.budget.bytes - self._need
            self.returning.fit(room // serving.model.kv_bytes)
        self._begin(now)
        return Done(served, rolled, lost)

    def next(self) -> float:
        """When something ends, if nothing else happens."""
        left = math.inf
        serving, rollout = self.serving, self.rollout
        fast, slow = self._speeds
        if serving is not None and serving.steps and fast > 0:
            left = serving.work / fast
        if rollout.steps and slow > 0:
            left = min(left, rollout.work / slow)
        if (self.host or self.stranger) and left < math.inf:
            weight = self._weight
            stranger_s = left / weight * self.stranger if weight else 0.0
            left += stranger_s + (min(self.host, left / weight) if weight else self.host)
        return min(self.at + left, self._again)

    # ---- what comes in

    @property
    def runnable(self) -> int:
        """Engines that have a step on the device and do not give way to the host."""
        serves = self.serving is not None and self.serving.steps > 0
        return serves + self._rolls

    @property
    def _rolls(self) -> bool:
        """The rollout engine has a step on the device and does not give way."""
        return self.rollout.steps > 0 and self._preempt_s is None

    @property
    def _weight(self) -> float:
        """What both engines get where the host gets 1."""
        serving = self.serving
        return (serving.weight if serving is not None and serving.steps else 0.0) + self._rolls

    def take_host(self, seconds: float, *, fair: bool = False) -> float:
        """Work of the host, which gets an equal share; how long until it is done as things are:
        after what the host has to do here already, or in a fair share with it."""
        before = min(self.host, seconds) if fair else self.host
        self.host += seconds
        return (before + seconds) * (1 + self._weight + self.stranger)

    def arrive(self, job: Job, now: float) -> None:
        """A serving request."""
        assert self.serving is not None
        self._arrived += 1
        self._errors.earn(self._arrived)
        self._arrivals.append(now)
        self.serving.cut()
        self.rollout.cut()
        self.serving.add(job if self.returning is None else self.returning.begin(job, now))

    def take(self, job: Job) -> None:
        """A turn."""
        self.rollout.cut()
        self.rollout.add(job)

    def wake(self) -> None:
        self.active = True

    def sleep(self) -> list[tuple[Job, int]]:
        """Serving has its device back: all turns with what they have made."""
        self.active = False
        return self.drop()

    def drop(self) -> list[tuple[Job, int]]:
        """All turns leave, with what they have made."""
        self.rollout.cut()
        self.rollout.steps, self.rollout.work = 0, 0.0
        everyone = {job.id for _, _, job in self.rollout.ending}
        everyone |= {prompt.job.id for prompt in self.rollout.waiting}
        return list(self.rollout.remove(everyone))

    # ---- sharing

    def _begin(self, now: float) -> None:
        serving, rollout = self.serving, self.rollout
        self._again = math.inf
        if serving is None:
            self._speeds = (NOBODY, ALONE)
            if not rollout.steps and rollout.busy:
                rollout.plan()
            return
        if not serving.busy:
            self._busy_since = None
        else:
            if not serving.steps:
                serving.plan()
                if rollout.steps and self._speeds[1] > NOBODY:
                    serving.work += self._preempt_s or 0.0
            if self._busy_since is None:
                self._busy_since = now
        if self.active and not rollout.steps and rollout.busy:
            self._shares = self._ask(serving, now)
            if self._shares.tokens:
                rollout.plan(self._shares.tokens)
                held_up = rollout.unit if self._preempt_s is None else self._preempt_s
                self.longest_s = max(self.longest_s, held_up)
        self._speeds = self._divide(serving)

    def _ask(self, serving: Engine, now: float) -> Shares:
        assert self._sharing is not None
        due = math.inf
        if self._arrivals:
            due = self._arrivals[0] + self._sharing.slo.ttft_s - now
        began = self._busy_since if self._busy_since is not None else now
        patience = self._sharing.patience(self.rollout)
        patient = now - began >= patience - SLIVER
        if not patient:
            self._again = began + patience
        return self._sharing.of(
            serving,
            self.rollout,
            due_s=due,
            allowance=self._errors.left,
            patient=patient,
            lacks=self.lacks(now),
        )

    def lacks(self, now: float) -> bool:
        """A worst-case new request, or a burst like recent ones, would not find its memory."""
        assert self._sharing is not None
        newcomer, lent = self._sharing.newcomer, self.budget.bytes
        if newcomer is None or not lent:
            return False
        quota = self._memory.total - lent
        if self._need + newcomer > quota:
            return True
        return self._most_need > quota and self._peak.of(self._need, now) > quota

    def _divide(self, serving: Engine) -> tuple[float, float]:
        """How fast both go until something happens."""
        assert self._sharing is not None
        if not self.rollout.steps:
            return (0.5 if self._sharing.terms.rule == "static_split" else ALONE), NOBODY
        if not serving.steps:
            return NOBODY, max(self._shares.rollout, NOBODY) or ALONE
        if self._preempt_s is not None:
            return ALONE, NOBODY
        if self._shares.serving > 0:
            return self._shares.serving, self._shares.rollout
        both = serving.weight + 1  # begun while serving was idle: to its end, by turns
        return serving.weight / both, 1 / both

    # ---- memory

    def _split(self, now: float) -> list[tuple[Job, int]]:
        serving, rollout = self.serving, self.rollout
        if serving is None:
            return []
        need = (serving.context + serving.prompts) * serving.model.kv_bytes
        if need != self._need:
            self._need = need
            self._most_need = self._peak.of(need, now)
        warm = 0
        if self.returning is not None:
            warm = self.returning.warm(now) * serving.model.kv_bytes
        if need + warm == self._most_at and self.active:
            return []
        demand = Demand(self.active, need, rl_step=self.rl_step, serving_warm=warm)
        before = self.budget
        self.budget = memory.decide(before, demand, self._memory, now)
        is_most = self.budget.bytes == memory.ceiling(demand, self._memory)
        self._most_at = need + warm if is_most else -1
        if self.budget.bytes >= before.bytes:
            return []
        held = (rollout.context + rollout.prompts) * rollout.model.kv_bytes
        if held <= self.budget.bytes:
            return []
        return self._evict(held - self.budget.bytes)

    def _evict(self, excess: int) -> list[tuple[Job, int]]:
        """Turns with the least computed work go first; the step in flight is given up."""
        rollout = self.rollout
        rollout.cut()
        rollout.steps, rollout.work = 0, 0.0
        gone: set[int] = set()
        for prompt in reversed(rollout.waiting):
            if excess <= 0:
                break
            gone.add(prompt.job.id)
            excess -= max(1, prompt.job.prompt) * rollout.model.kv_bytes
        for ends, id_, job in sorted(rollout.ending, key=lambda entry: -entry[0]):
            if excess <= 0:
                break
            gone.add(id_)
            excess -= (job.context + job.new - (ends - rollout.made)) * rollout.model.kv_bytes
        return list(rollout.remove(gone))

    @property
    def capacity(self) -> int:
        """Tokens of rollouts' KV."""
        return self.budget.bytes // self.rollout.model.kv_bytes
