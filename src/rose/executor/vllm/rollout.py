"""The rollout engine's scheduler: stock vLLM behind a gate, with a KV quota and an off switch.

Every step: do what the node ordered and serving needs, pass the gate, then let vLLM schedule within
the granted tokens. A refused step comes out empty after at most `gate.GATE_S`, so that vLLM's loop
keeps taking new and aborted requests. Turns that lose their memory or their lease end with
`finish_reason: "abort"` and a `stop_reason` of `rose:...` that says why; the tokens so far are
delivered. The thread aside does the thinking: orders, memory, the gate's window, facts. What must
not happen during a step (ending turns, taking blocks in use) it leaves to the engine's thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.executor import lifecycle, memory, priority
from rose.executor.admission import CHUNK, Refusal, Window
from rose.executor.aside import Aside
from rose.executor.borrower import Borrower
from rose.executor.facts import LeaseState, RolloutFacts
from rose.executor.gate import Gate
from rose.executor.latency import ROLLOUT_QUANTILE
from rose.executor.page import Page
from rose.executor.prefix_book import PrefixBook
from rose.executor.vllm import compat
from rose.executor.vllm.engine import Device, step_of
from rose.executor.vllm.last_turns import LastTurns
from rose.executor.vllm.options import RolloutOptions, options_from
from rose.executor.vllm.overhead import Overhead

compat.check()

STUCK_S = 1.0
"""A turn that does not fit into the whole budget for this long is ended: elsewhere it may fit."""
LOOK_S = 0.1
"""Orders and memory are looked at this often even if nobody rang: growth needs no bell."""
DORMANT_LOOK_S = 1.0
SOON_S = 0.005
"""Never look more often than this without news."""
RECLAIMED = "rose:reclaimed"
"""Serving needed the memory; go on elsewhere from the tokens so far."""
REVOKED = "rose:revoked"
"""The lease ended; go on elsewhere from the tokens so far."""
DORMANT = "rose:dormant"
"""This engine takes no turns now; nothing was computed."""


_Done = tuple[Any, Window, float, float | None, float]
"""A step that has ended: vLLM's output, the window it used, began, device clock then, ended."""


class RolloutScheduler(Scheduler):
    max_num_scheduled_tokens: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        options = self.options = options_from(vllm_config.additional_config, RolloutOptions)
        page = Page.create(Path(options.page), kv_total=options.kv_total, device=options.device)
        if not page.own("rollout"):
            owner = page.rollout()
            raise RuntimeError(
                f"page {options.page} already has a rollout engine, process "
                f"{owner.writer.pid if owner is not None else 'unknown'}"
            )
        self.device = Device(self, options, page, ROLLOUT_QUANTILE)
        self._most_tokens: int = self.max_num_scheduled_tokens
        self.gate = Gate(
            page,
            self.device.latency,
            self.device.seconds,
            dedicated=options.dedicated,
            chunk=self._most_tokens if options.dedicated else CHUNK,
        )
        self.stock_schedule = super().schedule
        self.stock_update = super().update_from_output
        self._last_turns = LastTurns(self.kv_cache_manager)
        self._overhead = Overhead(self, lambda: self.gate.waited_s)
        parking = self.device.parking
        terms = memory.MemoryTerms(
            total=options.kv_total,
            headroom=0.0 if options.dedicated else options.headroom,
            rollout_max=parking.blocks * parking.block_bytes,
        )
        self._borrower = Borrower(
            page, parking, self._publish, terms, dedicated=options.dedicated, void=self.gate.void
        )
        self._border = self._borrower.border
        self._book = PrefixBook(parking.blocks, self.block_size, options.prefix_loss)
        self._chores = True
        self._news_for_node = False
        self._done: list[_Done] = []
        self._ended: list[tuple[Any, str]] = []
        self._stuck_since = math.inf
        self._publishing = threading.Lock()
        self._tick = 0
        self._step_last_ms = 0.0
        self._granted = self._granted_tokens = 0
        self._count: Counter[str] = Counter()
        self._publish()
        self.aside = Aside("rollout", page, self._look_around, fatal=True)
        for bell in ("watch", "gate"):
            self.aside.watch(bell)

    # ---- vLLM's hooks, in the engine's thread

    def add_request(self, request: Any) -> None:
        self._last_turns.note(request)
        super().add_request(request)
        self.aside.post((self._arrived, (request,)))

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        self.device.guard.enter()
        ended = super().finish_requests(request_ids, finished_status)
        self.device.guard.leave()
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self.device.guard.enter()
        with self.device.parking.lifted():
            done = bool(super().reset_prefix_cache(*args, **kwargs))
        self.device.guard.leave()
        if done:
            self.aside.post((self._book.empty, ()))
        return done

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if not self.device.placed:
            self.device.place_threads()
        if self._chores:
            self._do_chores()
        gate, guard = self.gate, self.device.guard
        tokens = gate.tokens(len(self.running)) if self.requests else 0
        if not tokens and self._done:
            self._tell_aside()  # the gate may be shut because it does not know that they ended
        guard.inside += 1
        if guard.wanted:
            guard.wait()
            tokens = tokens and gate.granted(len(self.running), time.monotonic())
        self.max_num_scheduled_tokens = min(tokens, self._most_tokens)
        # A turn begins only if those that run can grow by a block each: one that has to make room
        # for another is computed anew.
        self.kv_cache_manager.watermark_blocks = len(self.running)
        output = self.stock_schedule(throttle_prefills)
        guard.inside -= 1
        if output.total_num_scheduled_tokens:
            gate.begun += 1
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        guard = self.device.guard
        guard.inside += 1
        if guard.wanted:
            guard.wait()
        outputs = self.stock_update(scheduler_output, model_runner_output)
        guard.inside -= 1
        if scheduler_output.total_num_scheduled_tokens:
            gate = self.gate
            self._done.append(
                (scheduler_output, gate.used, gate.used_at, gate.used_seconds, time.monotonic())
            )
            if gate.used_seconds is not None or gate.watchful or not self.running:
                self._tell_aside()
        if self._ended:
            self._deliver_ends(outputs)
        return outputs

    def _tell_aside(self) -> None:
        done, self._done = self._done, []
        self.aside.post((self._stepped, (done,)))

    def _do_chores(self) -> None:
        """Between two steps: end the turns that have to go, give up blocks that were in use."""
        state = self._borrower.state
        self._chores = not lifecycle.takes_turns(state)
        self.device.guard.enter()
        if not lifecycle.takes_turns(state):
            turns = [r for r in self.requests.values() if not r.is_finished()]
            begun = [r for r in turns if r.num_computed_tokens or r.num_output_tokens]
            self._end([r for r in turns if r not in begun], DORMANT)
            if state != LeaseState.DRAINING:
                self._end(begun, REVOKED)
        self._follow_memory(may_end=True)
        if time.monotonic() - self._stuck_since > STUCK_S:
            self._end([r for r in list(self.waiting)[:1] if not self._fits(r)], RECLAIMED)
        self.device.guard.leave()

    # ---- aside

    def _arrived(self, request: Any) -> None:
        tokens = request.num_prompt_tokens
        self._book.begin(request.request_id, request.block_hashes, tokens, time.monotonic())

    def _stepped(self, done: list[_Done]) -> None:
        seconds = self.device.seconds()
        for output, window, began, clock, ended in done:
            for new in output.scheduled_new_reqs:
                self._book.found(new.req_id, new.num_computed_tokens)
            step, _ = step_of(output)
            self.gate.end(window, step, began, ended)
            took = self.device.latency.mean(step)
            if clock is not None:  # always the last: it is told at once
                took = seconds - clock
                self.device.latency.observe(step, took)
            self._step_last_ms = took * 1e3
            self._overhead.stepped()
            self._granted += 1
            self._granted_tokens += step.tokens

    def _look_around(self) -> float:
        """Carry out orders, follow the memory policy, set the gate, tell how the engine stands."""
        borrower = self._borrower
        with self.device.guard:
            self._follow_orders()
            if self._follow_memory(may_end=False):
                self._follow_orders()  # an engine that now has its memory is active
        turns = list(self.requests.values())
        now = time.monotonic()
        self._close_books(now)
        self._watch_stuck(turns, now)
        self._chores = (
            not lifecycle.takes_turns(borrower.state)
            or self._border.owes
            or now - self._stuck_since > STUCK_S
        )
        until = self.gate.decide(
            borrower.terms,
            active=borrower.may_run,
            turns=min(len(turns), self.max_num_running_reqs),
            context=sum(turn.num_tokens for turn in turns),
            give_back_s=self._border.give_back_s,
        )
        if not self._border.owes and not (turns and borrower.state == LeaseState.DORMANT):
            self._keep_class()
        self._publish()
        if self._news_for_node:
            self._news_for_node = False
            self.device.page.ring("node")
        if borrower.state == LeaseState.DORMANT:
            return DORMANT_LOOK_S
        return min(LOOK_S, max(SOON_S, until - time.monotonic()))

    def _keep_class(self) -> None:
        """Run in the class the terms ask for; serving or the node may have lifted us meanwhile.

        Not while they wait for us: a step that crawls in the idle class would hold them up.
        """
        wanted = self._borrower.terms.preempt_s is not None
        compute = self.device.compute
        if not compute:
            return
        if wanted != priority.is_idle(compute[0]) or priority.is_ahead(compute[0]):
            for thread in compute:
                priority.run_idle(thread) if wanted else priority.run_normal(thread)

    def _follow_orders(self) -> None:
        empty = all(request.is_finished() for request in list(self.requests.values()))
        self._news_for_node |= self._borrower.follow_orders(empty=empty)

    def _follow_memory(self, *, may_end: bool) -> bool:
        """Move rollout's side of the KV border; True when something changed."""
        return self._borrower.follow_memory(self._useful(), self._end_cheapest if may_end else None)

    def _useful(self) -> int:
        """Bytes that the turns here, and prefixes of those that come back, have a use for.

        A batch as large as the engine takes, of turns as long as these, may come at any moment:
        growing when it does would cost every turn a hand-over.
        """
        if self.options.dedicated:
            return self.options.kv_total
        parking, size = self.device.parking, self.block_size
        turns = list(self.requests.values())
        longest = max((turn.num_tokens for turn in turns), default=0) // size + 2
        batch = max(len(turns), self.max_num_running_reqs) * longest if turns else 0
        blocks = max(batch, parking.used) + self._book.cache.warm(time.monotonic())
        share = int(memory.GROW_SHARE * self.options.kv_total)
        return blocks * parking.block_bytes + share

    def _close_books(self, now: float) -> None:
        """Turns that have ended since the last look."""
        for name in self._book.names():
            if name not in self.requests:
                self._book.end(name, now)

    def _watch_stuck(self, turns: list[Any], now: float) -> None:
        """A turn larger than the whole budget would wait for ever, and all others behind it."""
        idle = self._borrower.state == LeaseState.ACTIVE and not self.running
        if idle and not all(self._fits(turn) for turn in turns):
            self._stuck_since = min(self._stuck_since, now)
        else:
            self._stuck_since = math.inf

    def _fits(self, turn: Any) -> bool:
        blocks: int = -(-(turn.num_tokens + 1) // self.block_size)
        return blocks <= self.device.parking.usable

    # ---- turns that end early

    def _end_cheapest(self, blocks: int) -> None:
        """End running turns, least computed work first, until that many blocks are free."""
        parking = self.device.parking
        for request in sorted(self.running, key=lambda r: r.num_computed_tokens):
            if parking.usable - parking.used >= blocks:
                return
            self._end([request], RECLAIMED)

    def _end(self, requests: list[Any], reason: str) -> None:
        if not requests:
            return
        ids = [request.request_id for request in requests]
        super().finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self._ended += [(request, reason) for request in requests]
        self._count[reason] += len(requests)

    def _deliver_ends(self, outputs: dict[int, Any]) -> None:
        """Tell the clients of turns that were ended."""
        for request, reason in self._ended:
            mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            mine.outputs.append(
                EngineCoreOutput(
                    request.request_id, [], finish_reason=FinishReason.ABORT, stop_reason=reason
                )
            )
        self._ended.clear()
        self._news_for_node = True
        self.aside.nudge()

    # ---- facts

    def _publish(self) -> None:
        with self._publishing:
            self.device.page.publish("rollout", self._facts())

    def _facts(self) -> RolloutFacts:
        parking, count, refused = self.device.parking, self._count, self.gate.refused
        running, waiting = self.get_request_counts()
        self._tick += 1
        return RolloutFacts(
            tick=self._tick,
            written=time.monotonic(),
            begun=self.gate.begun,
            ended=self._granted,
            state=self._borrower.state,
            epoch=self._borrower.epoch,
            running=running,
            waiting=waiting,
            preemptible=int(self._borrower.terms.preempt_s is not None),
            granted=self._granted,
            granted_tokens=self._granted_tokens,
            refused_busy=refused[Refusal.BUSY],
            refused_decode=refused[Refusal.DECODE],
            refused_prefill=refused[Refusal.PREFILL],
            refused_arrival=refused[Refusal.ARRIVAL],
            refused_memory=refused[Refusal.MEMORY],
            refused_page=refused[Refusal.PAGE],
            refused_state=refused[Refusal.STATE],
            late_expected=self.gate.risk,
            kv_claim=self._border.claim,
            kv_revision=self._border.revision,
            kv_used=parking.used * parking.block_bytes,
            kv_resident=parking.usable_bytes,
            kv_may=self._border.may,
            kv_max=parking.blocks * parking.block_bytes,
            kv_cuts=self._border.cuts,
            kv_grown=self._border.grown,
            ended_reclaimed=count[RECLAIMED],
            ended_revoked=count[REVOKED],
            ended_dormant=count[DORMANT],
            preempted=sum(r.num_preemptions for r in list(self.requests.values())),
            reclaim_last_ms=self._border.reclaim_ms,
            step_last_ms=self._step_last_ms,
            overhead_us=self._overhead.microseconds,
            latency_error=self.device.latency.error,
            latency_coverage=self.device.latency.coverage,
        )
