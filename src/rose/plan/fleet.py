"""A simulated fleet: devices, serving's users, trajectories, and the live policies that place them.

    arrivals --> devices <-- turns <-- waiting turns (order) <-- trajectories <-- tools
                   |                        ^
                   +-- what ends, is cut ---+        provisioner, leases: who is lent

Everything that happens is an event in one heap; between two events of a device nothing changes
there, so the cost is in events and not in seconds or steps. Same seed, same events, bit for bit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from rose.executor.latency import Step
from rose.plan.device import Device
from rose.plan.engine import Engine, Job
from rose.plan.places import Places
from rose.plan.workload.rollouts import Trajectories
from rose.plan.workload.traffic import Traffic
from rose.scheduler import lease, order, placement, provisioner
from rose.scheduler.facts import EngineFacts, Speed
from rose.scheduler.fleet import MEASURED, TYPICAL_TURNS
from rose.scheduler.lease import Lease, Order, Phase, Word
from rose.scheduler.order import Waiting
from rose.scheduler.placement import Placing
from rose.scheduler.speed import Meter

MOST_CANDIDATES = 16
"""Engines that a turn is compared for. More of them take longer and place no better: two random
choices are already close to the best of all (Mitzenmacher, 2001)."""
TICK_S = 1.0
"""Between two looks at who should be lent, as nodes report."""
LOOK_FURTHER = 8
DRAWN = 4096
"""Random numbers at once."""
UNMEASURED = Speed(turn_s=0.0)
"""Schedulers that do not measure give an engine as many turns as vLLM runs at once."""
MOST_GAPS = 16
"""Gaps between tokens that a turn tells its engine's meter: a live one tells more, and fades."""


class Kind(NamedTuple):
    """How rollouts may use the devices of a system."""

    placement: str = "cost"
    order: str = "longest_first"
    most_borrowed: int = 0
    activate_s: float = 0.1
    """From asking for a device until it takes turns."""
    keep_s: float = provisioner.KEEP_S
    revoked_per_s: float = 0.0
    """How often a borrowed device is taken away, for good or until it is asked for again."""
    away_s: float = 0.0
    limit_s: float = math.inf
    """A borrowed device is given back after so long (serverless)."""
    places: float = math.inf
    """Trajectories at once for every device that takes turns."""
    in_flight: float = math.inf
    """Trajectories at once in all."""
    dealt: bool = False
    """Trajectories wait for the places they were dealt to (`places`)."""
    gpus: int = 1
    """Of a device."""


@dataclass
class Served:
    """What users of serving saw, request by request."""

    arrival: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)


@dataclass
class Lent:
    """One borrowed device."""

    lease: Lease = field(default_factory=Lease)
    wanted: bool = False
    active: bool = False
    offered: bool = True
    since: float = 0.0
    served_s: float = 0.0
    """Serving's time on the device when it was last looked at, and while it was lent."""
    served_lent_s: float = 0.0
    activating_s: float = 0.0
    lent_s: float = 0.0


class Fleet:
    def __init__(
        self,
        devices: Sequence[Device],
        traffic: Sequence[Traffic | None],
        kind: Kind,
        rng: np.random.Generator,
    ) -> None:
        self.devices, self.kind, self._rng = devices, kind, rng
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[float], None] | None, int, int]] = []
        self._number = 0
        self._traffic = traffic
        self._next_request = [0] * len(devices)
        self._requests: dict[int, tuple[float, float]] = {}
        self.served = Served()
        self._waiting: list[tuple[float, int, int]] = []
        self._own = [d for d in devices if d.active]
        self._others = [d for d in devices if not d.active]
        self.lent = {d.number: Lent() for d in self._others}
        self._ready: list[Device] = []
        """Devices that take turns, in no order, and where each is."""
        self._place_of: dict[int, int] = {}
        self._drawn: list[float] = []
        for device in self._own:
            self._offer(device)
        self._changed = -1e9
        self._low_since: float | None = None
        self.timeline: list[tuple[float, int]] = []
        """When how many borrowed devices took turns."""
        self._work = 0.0
        """Tokens that turns at hand and those that will likely follow them still make."""
        self._cached: list[OrderedDict[int, int]] = [OrderedDict() for _ in devices]
        self._held = [0] * len(devices)
        self._measures = kind.placement == "cost"
        self._meters = [Meter(_first_guess(d)) for d in devices]
        self.refills = False
        """A trajectory that ends makes room for the next."""
        self.ends: Callable[[int], None] = lambda _: None
        """Told of every trajectory that ends."""
        self.hits = self.looked = 0
        self.cuts = 0
        self._places = Places(kind.places, kind.in_flight, kind.dealt)
        self._plan: Trajectories | None = None
        for device in devices:
            self._expect_request(device)
        if self.kind.most_borrowed and self._others:
            self._at(0.0, self._tick)

    # ---- time

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._number += 1
        heappush(self._heap, (when, self._number, act, -1, 0))

    def run(self, until: Callable[[], bool], latest: float = math.inf) -> float:
        """Let time pass until something is so; returns when that is."""
        while not until():
            if not self._heap or self._heap[0][0] > latest:
                self.now = latest if latest < math.inf else self.now
                break
            now, _, act, number, epoch = heappop(self._heap)
            self.now = now
            self.events += 1
            if act is not None:
                act(now)
            else:
                device = self.devices[number]
                if device.epoch == epoch:
                    device.advance(now)
                    self._settle(device, now)
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.run(lambda: False, self.now + seconds)

    def _settle(self, device: Device, now: float) -> None:
        """Hear what a device has to say, and when it will next."""
        done = device.settle(now)
        for event in done.served:
            self._was_served(event.job, event.first, now)
        ended = False
        for event in done.rolled:
            if event.first:
                self._turn_speaks(device, event.job, now)
            else:
                ended = True
                self._turn_ended(device, event.job, now)
        for job, made in done.lost:
            self._turn_lost(device, job, made, now)
        device.epoch += 1
        when = device.next()
        if when < math.inf:
            self._number += 1
            heappush(self._heap, (when, self._number, None, device.number, device.epoch))
        if (ended or done.lost) and self._waiting:
            self._dispatch(now)

    # ---- serving

    def _expect_request(self, device: Device) -> None:
        traffic = self._traffic[device.number]
        index = self._next_request[device.number]
        if traffic is not None and index < len(traffic):
            self._at(float(traffic.arrival_s[index]), partial(self._arrive, device))

    def _arrive(self, device: Device, now: float) -> None:
        traffic = self._traffic[device.number]
        assert traffic is not None
        index = self._next_request[device.number]
        self._next_request[device.number] += 1
        prompt, output = int(traffic.prompt[index]), int(traffic.output[index])
        id_ = len(self.served.arrival)
        self.served.arrival.append(now)
        self.served.ttft.append(math.nan)
        self.served.tpot.append(0.0)
        device.advance(now)
        device.arrive(Job(id_, prompt, prompt, output), now)
        self._settle(device, now)
        self._expect_request(device)

    def _was_served(self, job: Job, first: bool, now: float) -> None:
        served = self.served
        if first:
            served.ttft[job.id] = now - served.arrival[job.id]
        elif job.new > 1:
            began = served.arrival[job.id] + served.ttft[job.id]
            served.tpot[job.id] = (now - began) / (job.new - 1)

    # ---- trajectories

    def begin(self, plan: Trajectories, rl_step: int, most: int | None = None) -> None:
        """Trajectories of new weights, all or the first so many; see `more`."""
        self._plan = plan
        count = len(plan)
        self._turn = plan.offset[:-1].tolist()
        """Of every trajectory, the turn that it is at."""
        self._last = plan.offset[1:].tolist()
        self._length = plan.prompt.tolist()
        """Its context before that turn."""
        self._made = [0] * count
        """New tokens of that turn that were made before it was cut."""
        self._before: list[int] = [-1] * count
        self._began = [0.0] * count
        self._new, self._seen = plan.output.tolist(), plan.observation.tolist()
        self._tool = plan.tool_s.tolist()
        self._expected = float(np.mean(plan.output))
        self.ended = np.full(count, np.nan)
        self.left = count
        self.started = self._due = 0
        self._places.clear(int(np.count_nonzero(plan.group == plan.group[0])))
        self.learned(rl_step)
        for cached in self._cached:
            cached.clear()
        self._held = [0] * len(self.devices)
        self.more(count if most is None else most)

    def learned(self, rl_step: int) -> None:
        """A step begins: memory that was frozen for the last one thaws."""
        for device in self.devices:
            device.rl_step = rl_step

    def more(self, total: int) -> None:
        """Begin trajectories until so many have begun, as places become free."""
        self.allow(total)
        self._enter(self.now)
        self._dispatch(self.now)

    def allow(self, total: int) -> None:
        """So many may begin; they do when the next one ends."""
        total = min(total, len(self.ended))
        if total > self._due:
            self._places.wait(range(self._due, total))
            self._due = total

    def _enter(self, now: float) -> None:
        for trajectory in self._places.enter(len(self._ready)):
            self._submit(trajectory, now)
            self.started += 1

    @property
    def done(self) -> int:
        return len(self.ended) - self.left

    def abandon(self) -> None:
        """What has not ended is not needed any more."""
        self._plan, self._waiting, self._work = None, [], 0.0
        self._places.clear(1)
        for device in self.devices:
            device.advance(self.now)
            device.drop()
            self._settle(device, self.now)

    def _submit(self, trajectory: int, now: float) -> None:
        plan = self._plan
        assert plan is not None
        turns = self._turn[trajectory] - int(plan.offset[trajectory])
        self._began[trajectory] = now
        self._work += self._weight(turns)
        rank = order.rank(self.kind.order, Waiting(now, self._expected, turns))
        self._number += 1
        heappush(self._waiting, (rank, self._number, trajectory))

    def _weight(self, turns: int) -> float:
        return self._expected * (1 + min(turns, placement.MOST_FURTHER))

    def _turn_speaks(self, device: Device, job: Job, now: float) -> None:
        """Its first token is there."""
        if device.rollout.prompts == 0:
            self._meters[device.number].first(job.prompt, now - self._began[job.id])
        self._began[job.id] = now

    def _turn_ended(self, device: Device, job: Job, now: float) -> None:
        plan, trajectory = self._plan, job.id
        assert plan is not None
        if job.new > 1:
            gap = (now - self._began[trajectory]) / (job.new - 1)
            for _ in range(min(MOST_GAPS, job.new // MEASURED)):
                self._meters[device.number].gap(device.rollout.count + 1, gap)
        turn = self._turn[trajectory]
        self._work -= self._weight(turn - int(plan.offset[trajectory]))
        device.rolled_tokens += job.new
        self._length[trajectory] += self._new[turn]
        self._keep(device, trajectory, self._length[trajectory])
        self._made[trajectory] = 0
        if turn + 1 == self._last[trajectory]:
            self.ended[trajectory] = now
            self._places.leave(trajectory)
            self.left -= 1
            self._forget(device, trajectory)
            self.ends(trajectory)
            self._enter(now)
            if self.refills:
                self._at(now, lambda _: self.more(self.started + 1))
            return
        self._length[trajectory] += self._seen[turn]
        self._turn[trajectory] = turn + 1

        def answered(then: float) -> None:
            if self._plan is plan:
                self._submit(trajectory, then)
                self._dispatch(then)

        self._at(now + self._tool[turn], answered)

    def _turn_lost(self, device: Device, job: Job, made: int, now: float) -> None:
        """Go on elsewhere from the tokens so far."""
        plan, trajectory = self._plan, job.id
        assert plan is not None
        self.cuts += 1
        device.rolled_tokens += made
        self._made[trajectory] += made
        self._work -= self._weight(self._turn[trajectory] - int(plan.offset[trajectory]))
        self._forget(device, trajectory)
        self._submit(trajectory, now)

    # ---- placement

    def _dispatch(self, now: float) -> None:
        missed: list[tuple[float, int, int]] = []
        while self._waiting and len(missed) < LOOK_FURTHER:
            entry = heappop(self._waiting)
            if not self._place(entry[2], now):
                missed.append(entry)
        for entry in missed:
            heappush(self._waiting, entry)

    def _place(self, trajectory: int, now: float) -> bool:
        candidates = self._candidates(self._before[trajectory])
        if not candidates:
            return False
        turn = self._turn[trajectory]
        made = self._made[trajectory]
        context = self._length[trajectory] + made
        cached = {
            str(d.number): self._cached[d.number][trajectory]
            for d in candidates
            if trajectory in self._cached[d.number]
        }
        assert self._plan is not None
        before = self._before[trajectory]
        asked = Placing(
            context,
            max(1, round(self._expected)),
            cached,
            str(before) if before >= 0 else None,
            turn - int(self._plan.offset[trajectory]),
            self._number,
        )
        facts = [self._facts(device) for device in candidates]
        chosen = placement.place(self.kind.placement, asked, facts)
        if chosen is None:
            return False
        device = self.devices[int(chosen.id)]
        had = min(cached.get(chosen.id, 0), context - 1)
        self.hits += had
        self.looked += context
        self._before[trajectory] = device.number
        self._forget(device, trajectory)  # in use from now on, and counted with what runs
        self._began[trajectory] = now
        device.advance(now)
        device.take(Job(trajectory, context - had, context, self._new[turn] - made))
        self._settle(device, now)
        return True

    def _candidates(self, before: int) -> list[Device]:
        ready = self._ready
        if len(ready) <= MOST_CANDIDATES:
            return ready
        if len(self._drawn) < MOST_CANDIDATES:
            self._drawn = self._rng.random(DRAWN).tolist()
        chosen = {int(self._drawn.pop() * len(ready)) for _ in range(MOST_CANDIDATES - 1)}
        if before >= 0 and (place := self._place_of.get(before)) is not None:
            chosen.add(place)
        return [ready[i] for i in chosen]

    def _offer(self, device: Device) -> None:
        self._place_of[device.number] = len(self._ready)
        self._ready.append(device)

    def _withdraw(self, device: Device) -> None:
        place = self._place_of.pop(device.number)
        last = self._ready.pop()
        if last is not device:
            self._ready[place] = last
            self._place_of[last.number] = place

    def _facts(self, device: Device) -> EngineFacts:
        rollout: Engine = device.rollout
        return EngineFacts(
            id=str(device.number),
            borrowed=device.number in self.lent,
            running=rollout.count,
            prefill_left=rollout.prompts,
            context=rollout.context + rollout.prompts,
            capacity=device.capacity,
            speed=self._meters[device.number].speed if self._measures else UNMEASURED,
            revoked_per_s=self.kind.revoked_per_s if device.number in self.lent else 0.0,
            gpus=self.kind.gpus,
        )

    def release(self) -> None:
        """All borrowed devices go back at once."""
        for device in self._others:
            one = self.lent[device.number]
            one.wanted = False
            if one.active:
                self._take_back(device, one, self.now)

    # ---- prefixes

    def _keep(self, device: Device, trajectory: int, tokens: int) -> None:
        """Its turn's KV stays until memory is wanted for others; the longest unused goes first."""
        cached = self._cached[device.number]
        self._held[device.number] += tokens - cached.pop(trajectory, 0)
        cached[trajectory] = tokens
        room = device.capacity - device.rollout.context - device.rollout.prompts
        while cached and self._held[device.number] > room:
            _, gone = cached.popitem(last=False)
            self._held[device.number] -= gone

    def _forget(self, device: Device, trajectory: int) -> None:
        self._held[device.number] -= self._cached[device.number].pop(trajectory, 0)

    # ---- lending

    def _tick(self, now: float) -> None:
        self._at(now + TICK_S, self._tick)
        devices = [self._device(d, now) for d in self.devices]
        demand = provisioner.Demand(
            self._work, len(self._waiting), self.kind.most_borrowed, self._changed
        )
        if not provisioner.is_low(demand, devices):
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        demand = provisioner.Demand(
            demand.tokens, demand.waiting, demand.most, demand.changed, self._low_since
        )
        wanted = provisioner.borrow(demand, devices, now, self.kind.keep_s)
        for device in self._others:
            one = self.lent[device.number]
            if one.wanted != (str(device.number) in wanted):
                self._changed = now
                one.wanted = not one.wanted
            self._lease(device, one, now)
        lent = sum(one.active for one in self.lent.values())
        if not self.timeline or self.timeline[-1][1] != lent:
            self.timeline.append((now, lent))

    def _device(self, device: Device, now: float) -> provisioner.Device:
        one = self.lent.get(device.number)
        makes = TYPICAL_TURNS / self._meters[device.number].speed.token_s(TYPICAL_TURNS)
        if one is None:
            return provisioner.Device(str(device.number), makes, True, True)
        one.served_lent_s += (device.serving_s - one.served_s) * one.active
        one.served_s = device.serving_s
        one.lent_s += TICK_S * one.active
        one.activating_s += TICK_S * (one.wanted and not one.active)
        return provisioner.Device(str(device.number), makes, one.wanted, offered=one.offered)

    def _lease(self, device: Device, one: Lent, now: float) -> None:
        word = Word(now, one.active, one.offered)
        one.lease, told = lease.step(one.lease, word, wanted=one.wanted, now=now)
        if told == Order.ACTIVATE:
            self._at(now + self.kind.activate_s, lambda then: self._activate(device, one, then))
        if one.active and one.lease.phase == Phase.DRAINING:
            if device.number in self._place_of:
                self._withdraw(device)
            if not device.rollout.busy:
                self._take_back(device, one, now)

    def _activate(self, device: Device, one: Lent, now: float) -> None:
        if one.active or not one.offered or one.lease.phase != Phase.ACTIVATING:
            return
        one.active, one.since = True, now
        self._offer(device)
        device.advance(now)
        device.wake()
        self._settle(device, now)
        self._lease(device, one, now)
        self._risk(device, one, now)
        self._enter(now)
        self._dispatch(now)

    def _risk(self, device: Device, one: Lent, now: float) -> None:
        """When it will be taken away."""
        held = self.kind.limit_s
        if self.kind.revoked_per_s:
            held = min(held, float(self._rng.exponential(1 / self.kind.revoked_per_s)))
        if held < math.inf:
            since = one.since
            self._at(now + held, lambda then: self._revoke(device, one, since, then))

    def _revoke(self, device: Device, one: Lent, since: float, now: float) -> None:
        if one.active and one.since == since:
            self._take_back(device, one, now)
            if self.kind.away_s:
                one.offered = False
                self._at(now + self.kind.away_s, lambda _: setattr(one, "offered", True))

    def _take_back(self, device: Device, one: Lent, now: float) -> None:
        one.active = False
        if device.number in self._place_of:
            self._withdraw(device)
        device.advance(now)
        lost = device.sleep()
        self._cached[device.number].clear()
        self._held[device.number] = 0
        for job, made in lost:
            self._turn_lost(device, job, made, now)
        self._settle(device, now)
        self._lease(device, one, now)
        self._enter(now)
        self._dispatch(now)


def _first_guess(device: Device) -> Speed:
    """Of an engine that nobody has measured yet, from its latency model."""
    mean = device.rollout.model.latency.mean
    one, many = mean(Step(0, 1, 1000)), mean(Step(0, 33, 33_000))
    turn_s = max(1e-6, (many - one) / 32)
    return Speed(one - turn_s, turn_s, (mean(Step(512, 1, 1000)) - one) / 512)
