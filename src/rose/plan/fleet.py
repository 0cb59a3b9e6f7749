"""A simulated fleet: devices, serving's users, trajectories, and the live policies that place them.

    users --> devices <-- turns <-- waiting turns (order) <-- trajectories <-- tools
                |                        ^
                +-- what ends, is cut ---+        provisioner, leases: who is lent

Everything that happens is an event in one heap; between two events of a device nothing changes
there, so the cost is in events and not in seconds or steps. Same seed, same events, bit for bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush

import numpy as np

from rose.executor.latency import Step
from rose.plan.device import Device
from rose.plan.engine import Job
from rose.plan.host import Host
from rose.plan.lending import Kind, Lending
from rose.plan.places import Places
from rose.plan.prefixes import Prefixes
from rose.plan.users import Users
from rose.plan.workload.rollouts import Trajectories
from rose.plan.workload.traffic import Traffic
from rose.scheduler import order, placement, provisioner
from rose.scheduler.facts import EngineFacts, Speed
from rose.scheduler.fleet import MEASURED
from rose.scheduler.order import Waiting
from rose.scheduler.placement import Placing
from rose.scheduler.speed import Meter

MOST_CANDIDATES = 16
"""Engines that a turn is compared for. More of them take longer and place no better: two random
choices are already close to the best of all (Mitzenmacher, 2001)."""
LOOK_FURTHER = 8
DRAWN = 4096
"""Random numbers at once."""
TOLD = 1 << 14
"""Events between two words on how far it is: some tenths of a second."""
UNMEASURED = Speed(turn_s=0.0)
"""Schedulers that do not measure give an engine as many turns as vLLM runs at once."""
MOST_GAPS = 16
"""Gaps between tokens that a turn tells its engine's meter: a live one tells more, and fades."""


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
        self.watch: Callable[[], None] = lambda: None
        """Called now and then, for who wants to show how far it is."""
        self._heap: list[tuple[float, int, Callable[[float], None] | None, int, int]] = []
        self._number = 0
        self._waiting: list[tuple[float, int, int]] = []
        self._ready: list[int] = []
        """Devices that take turns, in no order, and where each is."""
        self._place_of: dict[int, int] = {}
        self._drawn: list[float] = []
        for device in devices:
            if device.active:
                self.offer(device)
        self.work = 0.0
        """Tokens that turns at hand and those that will likely follow them still make."""
        self._prefixes = Prefixes(len(devices))
        self._measures = kind.placement == "cost"
        self._meters = [Meter(_first_guess(d)) for d in devices]
        self._told: list[EngineFacts | None] = [None] * len(devices)
        """Facts of a device: they hold until something happens there."""
        self._free = [0] * len(devices)
        """Places that it had then."""
        self.refills = False
        """A trajectory that ends makes room for the next."""
        self.ends: Callable[[int], None] = lambda _: None
        """Told of every trajectory that ends."""
        self.hits = self.looked = 0
        self.cuts = 0
        self._places = Places(kind.places, kind.in_flight, kind.dealt)
        self._plan: Trajectories | None = None
        self.host = Host(self)
        self.users = Users(self, traffic, kind.front_s)
        self.lending = Lending(self, [d for d in devices if not d.active], kind, rng)

    # ---- time

    def at(self, when: float, act: Callable[[float], None]) -> None:
        self._number += 1
        heappush(self._heap, (when, self._number, act, -1, 0))

    def run(self, until: Callable[[], bool], latest: float = math.inf) -> float:
        """Let time pass until something is so; returns when that is."""
        heap = self._heap
        while not until():
            if not heap or heap[0][0] > latest:
                self.now = latest if latest < math.inf else self.now
                break
            now, _, act, number, epoch = heappop(heap)
            self.now = now
            self.events += 1
            if not self.events % TOLD:
                self.watch()
            if act is not None:
                act(now)
            else:
                device = self.devices[number]
                if device.epoch == epoch:
                    device.advance(now)
                    self.settle(device, now)
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.run(lambda: False, self.now + seconds)

    def settle(self, device: Device, now: float) -> None:
        """Hear what a device has to say, and when it will next."""
        done = device.settle(now)
        for event in done.served:
            self.users.answered(event.job, event.first, now)
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
        self._told[device.number] = None
        when = device.next()
        if when < math.inf:
            self._number += 1
            heappush(self._heap, (when, self._number, None, device.number, device.epoch))
        if (ended or done.lost) and self._waiting:
            self.dispatch(now)

    # ---- trajectories

    def begin(self, plan: Trajectories, rl_step: int, most: int | None = None) -> None:
        """Trajectories of new weights, all or the first so many; see `more`."""
        self._plan = plan
        count = len(plan)
        self._first, self._last = plan.offset[:-1].tolist(), plan.offset[1:].tolist()
        """Of every trajectory, its first turn and the one after its last."""
        self._turn = self._first.copy()
        """The one that it is at."""
        self._length = plan.prompt.tolist()
        """Its context before that turn."""
        self._made = [0] * count
        """New tokens of that turn that were made before it was cut."""
        self._before: list[int] = [-1] * count
        self._began = [0.0] * count
        self._new, self._seen = plan.output.tolist(), plan.observation.tolist()
        self._tool = plan.tool_s.tolist()
        self._expected = float(np.mean(plan.output))
        self._usual = len(plan.output) / count
        self.ended = np.full(count, np.nan)
        self.left = count
        self.started = self._due = 0
        self._places.clear(int(np.count_nonzero(plan.group == plan.group[0])))
        self.learned(rl_step)
        for device in self.devices:
            self._prefixes.clear(device.number)
        self.more(count if most is None else most)

    def learned(self, rl_step: int) -> None:
        """A step begins: memory that was frozen for the last one thaws."""
        for device in self.devices:
            device.rl_step = rl_step

    @property
    def progress(self) -> float:
        """Share of the trajectories that have ended."""
        return 1.0 - self.left / len(self.ended)

    def more(self, total: int, *, urgent: bool = False) -> None:
        """Begin trajectories until so many have begun, as places become free; `urgent`: before
        others that have not begun."""
        self.allow(total, urgent=urgent)
        self.enter(self.now)
        self.dispatch(self.now)

    def allow(self, total: int, *, urgent: bool = False) -> None:
        """So many may begin; they do when the next one ends."""
        total = min(total, len(self.ended))
        if total > self._due:
            self._places.wait(range(self._due, total), urgent=urgent)
            self._due = total

    def enter(self, now: float) -> None:
        for trajectory in self._places.enter(len(self._ready)):
            self._submit(trajectory, now)
            self.started += 1

    @property
    def done(self) -> int:
        return len(self.ended) - self.left

    def abandon(self) -> None:
        """What has not ended is not needed any more."""
        self._plan, self._waiting, self.work = None, [], 0.0
        self._places.clear(1)
        for device in self.devices:
            device.advance(self.now)
            device.drop()
            self.settle(device, self.now)

    def _submit(self, trajectory: int, now: float) -> None:
        turns = self._turn[trajectory] - self._first[trajectory]
        self._began[trajectory] = now
        self.work += self._weight(turns)
        rank = order.rank(self.kind.order, Waiting(now, self._expected, turns))
        self._number += 1
        heappush(self._waiting, (rank, self._number, trajectory))

    def _weight(self, turns: int) -> float:
        to_come = provisioner.to_come(turns, self._usual)
        return self._expected * (1 + min(to_come, provisioner.MOST_TURNS))

    def _turn_speaks(self, device: Device, job: Job, now: float) -> None:
        """Its first token is there."""
        if device.rollout.prompts == 0:
            self._meters[device.number].first(job.prompt, now - self._began[job.id])
        self._began[job.id] = now

    def _turn_ended(self, device: Device, job: Job, now: float) -> None:
        plan, trajectory = self._plan, job.id
        assert plan is not None
        if times := min(MOST_GAPS, job.new // MEASURED):
            gap = (now - self._began[trajectory]) / (job.new - 1)
            self._meters[device.number].gap(device.rollout.count + 1, gap, times)
        turn = self._turn[trajectory]
        self.work -= self._weight(turn - self._first[trajectory])
        device.rolled_tokens += job.new
        self._length[trajectory] += self._new[turn]
        room = device.capacity - device.rollout.context - device.rollout.prompts
        self._prefixes.keep(device.number, trajectory, self._length[trajectory], room)
        self._made[trajectory] = 0
        ends = turn + 1 == self._last[trajectory]
        if self.kind.host_s:
            following = None if ends else partial(self._answered, plan, trajectory)
            self.at(now, partial(self._host, following, self._tool[turn]))
        if ends:
            self.ended[trajectory] = now
            self._places.leave(trajectory)
            self.left -= 1
            self._prefixes.forget(device.number, trajectory)
            self.ends(trajectory)
            self.enter(now)
            if self.refills:
                self.at(now, lambda _: self.more(self.started + 1))
            return
        self._length[trajectory] += self._seen[turn]
        self._turn[trajectory] = turn + 1
        if not self.kind.host_s:
            self.at(now + self._tool[turn], partial(self._answered, plan, trajectory))

    def _answered(self, plan: Trajectories, trajectory: int, now: float) -> None:
        if self._plan is plan:  # else nobody waits for it any more
            self._submit(trajectory, now)
            self.dispatch(now)

    def _host(self, following: Callable[[float], None] | None, tool_s: float, now: float) -> None:
        """A turn has ended: what follows in the trajectory, if anything, waits for the host."""
        done = self.host.work(self.kind.host_s, now)
        if following is not None:
            self.at(done + tool_s, following)

    def _turn_lost(self, device: Device, job: Job, made: int, now: float) -> None:
        """Go on elsewhere from the tokens so far."""
        trajectory = job.id
        self.cuts += 1
        device.rolled_tokens += made
        self._made[trajectory] += made
        self.work -= self._weight(self._turn[trajectory] - self._first[trajectory])
        self._prefixes.forget(device.number, trajectory)
        self._submit(trajectory, now)

    # ---- placement

    def dispatch(self, now: float) -> None:
        missed: list[tuple[float, int, int]] = []
        ahead: defaultdict[int, int] = defaultdict(int)
        while self._waiting and len(missed) < LOOK_FURTHER:
            entry = heappop(self._waiting)
            if not self._place(entry[2], len(self._waiting) + len(missed) + 1, ahead, now):
                missed.append(entry)
                ahead[self._before[entry[2]]] += 1
        for entry in missed:
            heappush(self._waiting, entry)

    def _place(self, trajectory: int, waiting: int, ahead: dict[int, int], now: float) -> bool:
        """`waiting`: turns, with this one; `ahead`: those that wait for their own device."""
        candidates = self._candidates(self._before[trajectory])
        if not candidates:
            return False
        turn = self._turn[trajectory]
        made = self._made[trajectory]
        context = self._length[trajectory] + made
        cached = self._prefixes.of(trajectory)
        before = self._before[trajectory]
        facts = [self._told[n] or self._facts(n) for n in candidates]
        free = sum([self._free[n] for n in candidates])
        asked = Placing(
            context,
            max(1, round(self._expected)),
            cached,
            str(before) if before >= 0 else None,
            turn - self._first[trajectory],
            self._number,
            crowded=waiting * len(candidates) > free * len(self._ready),
            ahead=ahead[before],
        )
        chosen = placement.place(self.kind.placement, asked, facts)
        if chosen is None:
            return False
        device = self.devices[int(chosen.id)]
        block = device.rollout.model.block
        had = min(cached.get(chosen.id, 0), context - 1) // block * block
        self.hits += had
        self.looked += context
        self._before[trajectory] = device.number
        # In use from now on, and counted with what runs.
        self._prefixes.forget(device.number, trajectory)
        self._began[trajectory] = now
        device.advance(now)
        device.take(Job(trajectory, context - had, context, self._new[turn] - made))
        self.settle(device, now)
        return True

    def _candidates(self, before: int) -> list[int]:
        ready = self._ready
        if len(ready) <= MOST_CANDIDATES:
            return ready
        if len(self._drawn) < MOST_CANDIDATES:
            self._drawn = self._rng.random(DRAWN).tolist()
        drawn, count = self._drawn[:-MOST_CANDIDATES:-1], len(ready)
        del self._drawn[1 - MOST_CANDIDATES :]
        chosen = {int(share * count) for share in drawn}
        if before >= 0 and (place := self._place_of.get(before)) is not None:
            chosen.add(place)
        return [ready[i] for i in chosen]

    def offer(self, device: Device) -> None:
        self._place_of[device.number] = len(self._ready)
        self._ready.append(device.number)

    def withdraw(self, device: Device) -> None:
        place = self._place_of.pop(device.number, None)
        if place is None:
            return
        last = self._ready.pop()
        if last != device.number:
            self._ready[place] = last
            self._place_of[last] = place

    def _facts(self, number: int) -> EngineFacts:
        device = self.devices[number]
        rollout = device.rollout
        borrowed = number in self.lending.lent
        facts = EngineFacts(
            id=str(number),
            borrowed=borrowed,
            running=rollout.count,
            prefill_left=rollout.prompts,
            context=rollout.context + rollout.prompts,
            capacity=device.capacity,
            speed=self._meters[number].speed if self._measures else UNMEASURED,
            revoked_per_s=self.kind.revoked_per_s if borrowed else 0.0,
            places=rollout.model.sequences,
            gpus=self.kind.gpus,
        )
        self._told[number] = facts
        self._free[number] = max(0, facts.slots - facts.running)
        return facts

    def speed(self, device: Device) -> Speed:
        """Of its rollout engine, as measured."""
        return self._meters[device.number].speed

    @property
    def waits(self) -> int:
        """Turns that have no device."""
        return len(self._waiting)

    def empty(self, device: Device, now: float) -> None:
        """Take all turns and prefixes from a device; turns go on elsewhere."""
        device.advance(now)
        lost = device.sleep()
        self._prefixes.clear(device.number)
        for job, made in lost:
            self._turn_lost(device, job, made, now)
        self.settle(device, now)


def _first_guess(device: Device) -> Speed:
    """Of an engine that nobody has measured yet, from its latency model."""
    mean = device.rollout.model.latency.mean
    one, many = mean(Step(0, 1, 1000)), mean(Step(0, 33, 33_000))
    turn_s = max(1e-6, (many - one) / 32)
    return Speed(one - turn_s, turn_s, (mean(Step(512, 1, 1000)) - one) / 512)
