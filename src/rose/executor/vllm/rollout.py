"""The rollout engine's scheduler: stock vLLM behind a gate, with a KV quota and an off switch.

Every step: obey the node's orders, follow the memory policy, ask `admit`, then let vLLM schedule
within the granted tokens. A refused step waits on serving's bell for at most `GATE_S` and comes out
empty, so that vLLM's loop keeps taking new and aborted requests. Turns that lose their memory or
their lease end with `finish_reason: "abort"` and a `stop_reason` of `rose:...` that says why; the
tokens so far are delivered.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from rose.executor import lifecycle, memory, priority
from rose.executor.admission import CHUNK, RULES, Grant, Refusal, Terms, admit
from rose.executor.facts import LeaseState, NodeOrders, RolloutFacts, ServingFacts
from rose.executor.latency import Step
from rose.executor.page import Page, Peer, Reading
from rose.executor.vllm import compat
from rose.executor.vllm.border import Border
from rose.executor.vllm.engine import Device, step_of
from rose.executor.vllm.options import RolloutOptions, options_from

compat.check()

GATE_S = 0.02
"""Longest wait inside `schedule`: bounds how late a new or aborted turn is noticed."""
STUCK_S = 1.0
"""A turn that does not fit into the whole budget for this long is ended: elsewhere it may fit."""
LOOK_S = 0.1
"""Orders and memory are looked at this often even if nobody rang: growth needs no bell."""
NODE_GRACE_S = 5.0
"""Without a node nobody could take the device back, so the engine lets go; time for a restart."""
LAST_TURN = "rose_last_turn"
"""`vllm_xargs` key: nothing of this trajectory will come back, its prefix may go first."""

RECLAIMED = "rose:reclaimed"
"""Serving needed the memory; go on elsewhere from the tokens so far."""
REVOKED = "rose:revoked"
"""The lease ended; go on elsewhere from the tokens so far."""
DORMANT = "rose:dormant"
"""This engine takes no turns now; nothing was computed."""


class RolloutScheduler(Scheduler):
    max_num_scheduled_tokens: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        options = self.options = options_from(vllm_config.additional_config, RolloutOptions)
        page = Page.create(Path(options.page), kv_total=options.kv_total, device=options.device)
        owner = page.rollout()
        if owner is not None and owner.writer.alive:
            raise RuntimeError(
                f"page {options.page} already has a rollout engine, process {owner.writer.pid}"
            )
        self.device = Device(self, options, page)
        self._most_tokens: int = self.max_num_scheduled_tokens
        self._terms = Terms()
        self._memory_terms = memory.MemoryTerms(
            total=options.kv_total,
            headroom=0.0 if options.dedicated else options.headroom,
            rollout_max=self.device.parking.blocks * self.device.parking.block_bytes,
        )
        self._state = LeaseState.DORMANT
        self._epoch = 0
        self._step: tuple[Step, float] | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=8)
        self._step_began = 0.0
        self._ended: list[tuple[Any, str]] = []
        self._stuck_since = math.inf
        self._serving = Peer()
        self._node = Peer()
        self._bell_seen = -1
        self._looked_at = 0.0
        self._node_seen_at = time.monotonic()
        self._count: dict[str, float] = defaultdict(int)
        self._border = Border(page, self.device.parking, self._publish, dedicated=options.dedicated)
        with self.device.lock:
            self._publish()
        self.device.watch("watch", self._while_idle, 1.0)

    # ---- vLLM's hooks

    def add_request(self, request: Any) -> None:
        with self.device.lock:
            super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        with self.device.lock:
            return super().finish_requests(request_ids, finished_status)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        parking = self.device.parking
        with self.device.lock:
            usable = parking.usable
            parking.set_usable(parking.blocks)
            done = bool(super().reset_prefix_cache(*args, **kwargs))
            parking.set_usable(usable)
        return done

    def schedule(self, throttle_prefills: bool = False) -> Any:
        device = self.device
        device.place_threads()
        began = time.thread_time()
        with device.lock:
            self._obey()
        device.overhead.add(time.thread_time() - began)
        grant = self._gate()
        with device.lock:
            self.max_num_scheduled_tokens = min(grant.tokens, self._most_tokens)
            output = super().schedule(throttle_prefills)
            began = time.thread_time()
            step = step_of(self.requests, output)
            if step.tokens:
                self._count["granted"] += 1
                self._count["granted_tokens"] += step.tokens
                self._step_began = time.monotonic()
                self._step = (step, device.seconds())
            device.overhead.add(time.thread_time() - began)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        device = self.device
        with device.lock:
            if self._step is not None:
                step, started = self._step
                seconds = device.seconds() - started
                device.latency.observe(step, seconds)
                self._count["step_last_ms"] = seconds * 1e3
                self._recent.append((self._step_began, time.monotonic()))
                self._step = None
            finishing = self._about_to_finish(scheduler_output)
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            began = time.thread_time()
            self._forget_prefixes(finishing)
            self._obey()
            if not self._deliver_ends(outputs):
                self._publish()
            device.overhead.add(time.thread_time() - began)
            device.overhead.end_step()
        return outputs

    # ---- compute

    def _gate(self) -> Grant:
        """Ask for the next step; when refused, wait for serving's bell until the time is up."""
        deadline = time.monotonic() + GATE_S
        page = self.device.page
        while True:
            began = time.thread_time()
            seen = page.bell("gate")
            grant = self._ask()
            self.device.overhead.add(time.thread_time() - began)
            left = deadline - time.monotonic()
            if grant.tokens or left <= 0:
                break
            page.wait("gate", seen, left)
        if grant.refusal is not None:
            self._count[f"refused_{grant.refusal}"] += 1
        return grant

    def _ask(self) -> Grant:
        if self._state not in (LeaseState.ACTIVE, LeaseState.DRAINING):
            return Grant(0, Refusal.STATE)
        want = self._want()
        if not want.tokens:
            return Grant(self._most_tokens)  # nothing to compute, only requests to let go
        if self.options.dedicated:
            return Grant(self._most_tokens, None, self.device.latency.upper(want))
        reading = self.device.page.serving()
        if reading is None:
            return Grant(0, Refusal.PAGE)
        facts = reading.facts if self._alive(reading) else _gone(reading.facts)
        occupied = sum(max(0.0, end - max(begin, facts.step_began)) for begin, end in self._recent)
        return admit(facts, want, self.device.latency, self._terms, time.monotonic(), occupied)

    def _want(self) -> Step:
        """What the engine would compute if nobody stopped it."""
        decode = prefill = context = 0
        for request in self.running:
            missing = request.num_tokens - request.num_computed_tokens
            context += request.num_computed_tokens
            if missing == 1:
                decode += 1
            else:
                prefill += missing
        room = self.max_num_active_reqs - len(self.running)
        for request in self.waiting:
            if room <= 0 or prefill >= CHUNK:
                break
            prefill += request.num_tokens
            context += request.num_tokens  # at worst all but one token of it is a cached prefix
            room -= 1
        return Step(min(prefill, self._most_tokens), decode, context)

    def _alive(self, reading: Reading[ServingFacts]) -> bool:
        return self._serving.alive(reading.writer)

    # ---- orders and memory

    def _while_idle(self) -> bool:
        """From the watcher thread: what can be done without waiting for the step in flight."""
        self._follow_orders()
        if self._follow_memory(may_end=False):
            self._follow_orders()  # an engine that now has its memory is active
        self._publish()
        return False

    def _obey(self) -> None:
        """Carry out what the node ordered and serving needs, if anything may have changed."""
        now, bell = time.monotonic(), self.device.page.bell("watch")
        turned_away = bool(self.requests) and not lifecycle.takes_turns(self._state)
        if bell == self._bell_seen and now - self._looked_at < LOOK_S and not turned_away:
            return
        self._bell_seen, self._looked_at = bell, now
        self._follow_orders()
        if not lifecycle.takes_turns(self._state):
            turns = [r for r in self.requests.values() if not r.is_finished()]
            begun = [r for r in turns if r.num_computed_tokens or r.num_output_tokens]
            self._end([r for r in turns if r not in begun], DORMANT)
            if self._state != LeaseState.DRAINING:
                self._end(begun, REVOKED)
        self._follow_memory(may_end=True)
        self._keep_class()

    def _keep_class(self) -> None:
        """Run in the class the terms ask for; serving or the node may have lifted us meanwhile."""
        wanted = self._terms.preempt_s is not None
        if wanted != priority.is_idle():
            for thread in priority.compute_threads():
                priority.run_idle(thread) if wanted else priority.run_normal(thread)

    def _follow_orders(self) -> bool:
        reading = self.device.page.node()
        if reading is None:
            return False
        ordered = LeaseState(reading.facts.state)
        self._terms = _terms(reading.facts)
        policy = memory.POLICIES[reading.facts.memory_policy]
        self._memory_terms = replace(self._memory_terms, policy=policy)
        now = time.monotonic()
        if self._node.alive(reading.writer):
            self._node_seen_at = now
        if now - self._node_seen_at > NODE_GRACE_S:
            ordered = LeaseState.DORMANT
        empty = not any(not r.is_finished() for r in self.requests.values())
        state = lifecycle.follow(
            self._state, ordered, has_memory=self.device.parking.usable > 0, empty=empty
        )
        changed = state != self._state or reading.facts.epoch != self._epoch
        self._state, self._epoch = state, reading.facts.epoch
        if changed:
            self.device.page.ring("node")
        return changed

    def _follow_memory(self, *, may_end: bool) -> bool:
        """Move rollout's side of the KV border; True when something changed."""
        reading = None if self.options.dedicated else self.device.page.serving()
        serving = reading.facts if reading is not None and self._alive(reading) else None
        demand = memory.Demand(
            active=lifecycle.holds_memory(self._state),
            serving_need=serving.kv_need if serving is not None else 0,
            serving_alive=serving is not None or self.options.dedicated,
            rl_step=self._epoch,
        )
        room = self._end_cheapest if may_end else None
        changed = self._border.follow(demand, self._memory_terms, serving, room)
        if may_end:
            self._end_stuck(time.monotonic())
        return changed

    def _end_cheapest(self, blocks: int) -> None:
        """End running turns, least computed work first, until that many blocks are free."""
        parking = self.device.parking
        for request in sorted(self.running, key=lambda r: r.num_computed_tokens):
            if parking.usable - parking.used >= blocks:
                return
            self._end([request], RECLAIMED)

    def _end_stuck(self, now: float) -> None:
        """A turn larger than the whole budget would wait for ever."""
        head = next(iter(self.waiting), None)
        usable = self.device.parking.usable
        if (
            self._state != LeaseState.ACTIVE
            or self.running
            or head is None
            or -(-(head.num_tokens + 1) // self.block_size) <= usable
        ):
            self._stuck_since = math.inf
        elif self._stuck_since == math.inf:
            self._stuck_since = now
        elif now - self._stuck_since > STUCK_S:
            self._end([head], RECLAIMED)
            self._stuck_since = math.inf

    def _end(self, requests: list[Any], reason: str) -> None:
        if not requests:
            return
        ids = [request.request_id for request in requests]
        super().finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self._ended += [(request, reason) for request in requests]
        self._count[reason.replace("rose:", "ended_")] += len(requests)

    def _deliver_ends(self, outputs: dict[int, Any]) -> bool:
        """Tell the clients of turns that were ended; True when there were any."""
        for request, reason in self._ended:
            mine = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            mine.outputs.append(
                EngineCoreOutput(
                    request.request_id, [], finish_reason=FinishReason.ABORT, stop_reason=reason
                )
            )
        if not self._ended:
            return False
        self._ended.clear()
        self._publish()
        self.device.page.ring("node")
        return True

    # ---- prefixes across turns

    def _about_to_finish(self, scheduler_output: Any) -> list[tuple[Any, list[Any]]]:
        """Last turns in this step and their blocks, which are unknown once vLLM has let them go."""
        last = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            params = request.sampling_params if request is not None else None
            if params is not None and params.extra_args and params.extra_args.get(LAST_TURN):
                groups = self.kv_cache_manager.get_blocks(request_id).blocks
                last.append((request, [block for group in groups for block in group]))
        return last

    def _forget_prefixes(self, last: list[tuple[Any, list[Any]]]) -> None:
        """Blocks of a trajectory that has ended are the first to be reused, before any other's."""
        queue = self.kv_cache_manager.block_pool.free_block_queue
        for request, blocks in last:
            if request.is_finished():
                free = [b for b in blocks if b.ref_cnt == 0 and not b.is_null]
                for block in free:
                    queue.remove(block)
                queue.prepend_n(free)

    # ---- facts

    def _publish(self) -> None:
        parking, count = self.device.parking, self._count
        running, waiting = self.get_request_counts()
        self._count["tick"] += 1
        self.device.page.publish(
            "rollout",
            RolloutFacts(
                tick=int(count["tick"]),
                state=self._state,
                epoch=self._epoch,
                running=running,
                waiting=waiting,
                preemptible=int(self._terms.preempt_s is not None),
                granted=int(count["granted"]),
                granted_tokens=int(count["granted_tokens"]),
                refused_busy=int(count["refused_busy"]),
                refused_decode=int(count["refused_decode"]),
                refused_prefill=int(count["refused_prefill"]),
                refused_arrival=int(count["refused_arrival"]),
                refused_page=int(count["refused_page"]),
                refused_state=int(count["refused_state"]),
                kv_claim=self._border.claim,
                kv_revision=self._border.revision,
                kv_used=parking.used * parking.block_bytes,
                kv_resident=parking.usable_bytes,
                kv_max=parking.blocks * parking.block_bytes,
                kv_cuts=self._border.cuts,
                kv_grown=self._border.grown,
                ended_reclaimed=int(count["ended_reclaimed"]),
                ended_revoked=int(count["ended_revoked"]),
                ended_dormant=int(count["ended_dormant"]),
                preempted=sum(r.num_preemptions for r in self.requests.values()),
                reclaim_last_ms=self._border.reclaim_ms,
                step_last_ms=float(count["step_last_ms"]),
                overhead_us=self.device.overhead.mean_us,
                latency_error=self.device.latency.error,
                latency_coverage=self.device.latency.coverage,
            ),
        )


def _terms(orders: NodeOrders) -> Terms:
    delay = orders.preempt_us / 1e6
    return Terms(list(RULES)[orders.rule], delay if orders.preempt_us else None)


def _gone(facts: ServingFacts) -> ServingFacts:
    """A dead serving engine has no requests: its compute may be used, its memory may not."""
    return ServingFacts(ttft_s=math.inf, tpot_s=math.inf, kv_max=facts.kv_max)
