"""Both engines of a simulated device: what rose runs in them is real, what vLLM does is made up."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rose.bench.trust.virtual import Process
from rose.executor import lifecycle
from rose.executor.aside import Aside
from rose.executor.borrower import Borrower
from rose.executor.facts import FACTS_S, LeaseState, RolloutFacts, ServingFacts
from rose.executor.gate import Gate
from rose.executor.latency import Profile, Step, Tracker
from rose.executor.lender import Lender
from rose.executor.memory import MemoryTerms
from rose.executor.page import Page

if TYPE_CHECKING:
    from rose.bench.trust.device import Device

BLOCK = 1 << 20
BLOCKS = 64
TOTAL = BLOCK * BLOCKS
HEADROOM = 0.2
STEP_S = 0.01
LONG_STEP_S = 0.3
"""A prefill chunk of a rollout step."""
TTFT_S, TPOT_S = 1.0, 0.2
PROFILE = Profile("sim", "sim", STEP_S, 2e-4, 1e-3, 0.0, margin=1.1, error=0.0)


class Parking:
    """KV blocks of an engine; those in use cannot be parked."""

    block_bytes = BLOCK

    def __init__(self, device: Device, blocks: int = BLOCKS) -> None:
        self._device = device
        self.blocks = self.usable = blocks
        self.used = 0

    def bring(self, blocks: int) -> bool:
        return False

    def set_usable(self, wanted: int) -> int:
        wanted = max(0, min(wanted, self.blocks))
        self.usable = max(wanted, min(self.used, self.usable)) if wanted < self.usable else wanted
        self._device.promises.moved()
        return self.usable


class SimAside(Aside):
    """The second thread of a process, as a task of it."""

    def __init__(self, process: Process, page: Page, then: Any, *bells: str, fatal: bool) -> None:
        self._process = process
        self.rung = asyncio.Event()
        super().__init__(process.name, page, then, fatal=fatal)
        self._put, self.post = self.post, self._posted
        for bell in bells:
            page.listen(bell, self.rung)  # type: ignore[attr-defined]

    def _start(self) -> None:
        self._process.spawn(self._live())

    async def _live(self) -> None:
        while True:
            await self._process.wait(self.rung, self.turn())

    def _posted(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._put(item)
        self.rung.set()

    def _end_process(self) -> None:
        self._process.kill()


class SimRollout:
    """A rollout engine with turns that come while it takes them."""

    def __init__(self, device: Device, process: Process) -> None:
        self.process, self._device = process, device
        self.page = page = device.open_page(process)
        if not page.own("rollout"):
            raise RuntimeError("there is a rollout engine already")
        clock = device.clock
        self.parking = Parking(device)
        device.rollout = self
        terms = MemoryTerms(TOTAL, HEADROOM, rollout_max=TOTAL)
        self.gate = Gate(page, Tracker(PROFILE), clock, dedicated=False, chunk=512, clock=clock)
        self.borrower = Borrower(
            page,
            self.parking,
            self._publish,
            terms,
            dedicated=False,
            clock=clock,
            void=self.gate.void,
        )
        self.border = self.borrower.border
        self.turns: list[int] = []
        """Steps that each still needs; every turn holds one block."""
        self.stepping = False
        self.steps = 0
        self._chores = True
        self._changed = asyncio.Event()
        self._publish()
        self.aside = SimAside(process, page, self._look, "watch", "gate", fatal=True)
        process.spawn(self._run())

    @property
    def known_arrivals(self) -> int | None:
        return self.gate._decided.arrivals

    def take(self, turns: int) -> None:
        if lifecycle.takes_turns(self.borrower.state):
            self.turns += [self._device.rng.randint(2, 30) for _ in range(turns)]
            self.aside.nudge()

    def _look(self) -> float:
        borrower, now = self.borrower, self._device.clock()
        news = borrower.follow_orders(empty=not self.turns)
        if borrower.follow_memory(TOTAL, None):
            news |= borrower.follow_orders(empty=not self.turns)
        self._chores = not lifecycle.takes_turns(borrower.state) or self.border.owes
        until = self.gate.decide(
            borrower.terms,
            active=borrower.may_run,
            turns=len(self.turns),
            context=0,
            give_back_s=self.border.give_back_s,
        )
        self._publish()
        if news:
            self.page.ring("node")
        self._changed.set()
        if borrower.state == LeaseState.DORMANT:
            return 1.0
        return min(0.1, max(0.02, until - now))

    async def _run(self) -> None:
        """The engine's own thread: chores between steps, then a step if the gate lets it."""
        while True:
            if self._chores:
                self._do_chores()
            now = self._device.clock()
            tokens = self.gate.granted(len(self.turns), now) if self.turns else 0
            if not tokens or not self.parking.usable:
                await self.process.wait(self._changed, 0.1)
                continue
            await self._step(tokens)

    async def _step(self, tokens: int) -> None:
        device, gate = self._device, self.gate
        device.promises.launched(self)
        began, window = device.clock(), gate.used
        gate.begun += 1
        self.parking.used = running = min(len(self.turns), self.parking.usable)
        self.stepping = True
        await self.process.sleep(LONG_STEP_S if tokens > 256 and self.steps % 7 == 0 else STEP_S)
        self.stepping, self.steps = False, self.steps + 1
        left = [left - 1 for left in self.turns[:running] if left > 1]
        self.turns = left + self.turns[running:]
        self.parking.used = 0
        ended = device.clock()
        step = Step(0, 1, 0)
        self.aside.post((gate.end, (window, step, began, ended)))

    def _do_chores(self) -> None:
        state = self.borrower.state
        self._chores = not lifecycle.takes_turns(state)
        if not lifecycle.takes_turns(state) and state != LeaseState.DRAINING:
            self.turns.clear()
        self.parking.used = 0
        self.borrower.follow_memory(TOTAL, self._make_room)
        self.aside.nudge() if self._chores and self.parking.usable else None

    def _make_room(self, blocks: int) -> None:
        self.turns.clear()
        self.parking.used = 0

    def _publish(self) -> None:
        border, parking = self.border_or_none, self.parking
        self.page.publish(
            "rollout",
            RolloutFacts(
                written=self._device.clock(),
                state=self.borrower.state if border else LeaseState.DORMANT,
                epoch=self.borrower.epoch if border else 0,
                running=len(self.turns) if border else 0,
                kv_claim=border.claim if border else 0,
                kv_revision=border.revision if border else 0,
                kv_resident=parking.usable * BLOCK,
                kv_max=TOTAL,
            ),
        )

    @property
    def border_or_none(self) -> Any:
        return getattr(self, "border", None)


class SimServing:
    """A serving engine; `stock` knows nothing of rose."""

    def __init__(self, device: Device, process: Process, kind: str) -> None:
        self.process, self.kind, self._device = process, kind, device
        self.total_blocks = BLOCKS
        self.parking: Parking | None = None
        self.requests: list[int] = []
        """Blocks that each wants; those that fit, from the first on, have theirs."""
        self.taken = self._known = int(device.clock() * 1e6)
        self.fails = 0
        """Looks of the second thread that will fail."""
        self.overloaded = False
        self.lender: Lender | None = None
        self.seen_at = device.clock()
        """When it last told of itself on the page; until then, when it began."""
        if kind == "stock":
            device.servings.append(self)
            return
        self.page = page = device.open_page(process)
        device.servings.append(self)
        parking = Parking(device)
        self.lender = Lender(
            page, parking, HEADROOM, nullcontext(), slice_bytes=16 * BLOCK,
            owns=page.own("serving"),
        )  # fmt: skip
        self.lender.stand(device.clock())
        for _ in range(1 + BLOCKS // 16):
            self.lender.respect(force=True)
        self.parking = parking  # before that nobody could be served
        self.aside = SimAside(process, page, self._tell, "serving", fatal=False)

    @property
    def told(self) -> bool:
        """It is on the page, and its second thread works."""
        return self.lender is not None and self.lender.owns and not self.fails

    @property
    def lacks(self) -> int:
        """Blocks that requests here wait for, and could have if nobody else held them."""
        if self.parking is None:
            return 0
        wanted = min(sum(self.requests), BLOCKS)
        return max(0, wanted - self.parking.usable)

    def arrive(self, blocks: int, lasts_s: float) -> None:
        self.taken += 1
        if self.lender is not None and self.lender.owns:
            self.page.arrive(self.taken)
        self.requests.append(blocks)
        self.process.spawn(self._serve(blocks, lasts_s))
        if self.lender is not None:
            self.aside.post((self._learn, (self.taken,)))

    async def _serve(self, blocks: int, lasts_s: float) -> None:
        """It waits for its memory, then holds it for a while."""
        while self.lacks and self.parking is not None:
            await self.process.sleep(0.1)
        await self.process.sleep(lasts_s)
        self.requests.remove(blocks)
        if self.lender is not None:
            self.aside.nudge()

    def _learn(self, taken: int) -> None:
        self._known = taken

    def _tell(self) -> float:
        """As `vllm.serving`."""
        assert self.lender is not None and self.parking is not None
        self.parking.used = min(sum(self.requests), self.parking.usable)
        self.lender.look(self._device.clock, self._publish, lambda why: None)
        return 0.001 if self.lender.handing_over else FACTS_S / 4

    def _publish(self, news: bool) -> None:
        if self.fails:
            self.fails -= 1
            raise ValueError("made to fail")
        assert self.lender is not None and self.parking is not None
        device, now = self._device, self._device.clock()
        if self.page.arrivals() != self.taken:
            self.page.arrive(self.taken)
        facts = self._facts(now).capped()
        self.page.publish("serving", facts)
        device.facts_at = self.seen_at = now
        self.page.ring("gate")
        if news or self.lacks:
            self.page.ring("watch")

    def _facts(self, now: float) -> ServingFacts:
        assert self.lender is not None and self.parking is not None
        busy = bool(self.requests)
        need = sum(self.requests) * BLOCK
        return ServingFacts(
            written=now,
            running=len(self.requests),
            decode_deadline=now + TPOT_S if busy else float("inf"),
            next_step_s=STEP_S if busy else 0.0,
            clear_s=7_200.0 if self.overloaded else 0.0,
            next_step_with_new_s=4 * STEP_S,
            clear_with_new_s=7_200.0 if self.overloaded else 4 * STEP_S,
            next_step_after_new_s=STEP_S,
            arrivals=self._known,
            step_began=now if busy else 0.0,
            step_ends=now + STEP_S if busy else 0.0,
            ttft_s=TTFT_S,
            tpot_s=TPOT_S,
            kv_used=min(need, self.parking.usable * BLOCK),
            kv_need=need,
            kv_lacks=max(0, 8 * BLOCK - self.parking.usable * BLOCK),
            kv_quota=self.parking.usable * BLOCK,
            kv_acked=self.lender.revision,
            kv_max=TOTAL,
        )
