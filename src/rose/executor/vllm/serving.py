"""The serving engine's scheduler: stock vLLM, plus a line on the page every tick.

It decides nothing about serving: same batches, same order, same answers. It publishes facts (what
runs, what waits, deadlines, upper bounds of its own next steps), keeps its KV quota at what the
rollout engine's claim leaves, and never waits for anything. If the page cannot be used it says so
once and serves as stock vLLM does.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.executor import priority, slo
from rose.executor.bounds import Queue, bounds
from rose.executor.facts import NEVER, RolloutFacts, ServingFacts
from rose.executor.latency import Step
from rose.executor.memory import WATERMARK, serving_quota
from rose.executor.page import Page, PageError, Peer, Reading, Writer
from rose.executor.slo import Slo
from rose.executor.vllm import compat
from rose.executor.vllm.engine import LIVENESS_S, Device, logger, step_of
from rose.executor.vllm.options import ServingOptions, options_from

compat.check()

PROMPTS_REMEMBERED = 512
WORST_PROMPT_QUANTILE = 0.99
SLICE = 16 << 20
"""Bytes parked at a time: returning pages takes the lock, and serving must not wait for it."""
GUARDED = 0.5
"""Share of the first-token promise that the worst-case new prompt may need by itself. A longer one
counts as this long: else one prompt that no device could serve in time would end all lending."""
FIRST_WORST_PROMPT = 256
"""Worst-case new prompt assumed before any has been seen."""


class _Life:
    """The clock of one serving request."""

    __slots__ = ("arrival", "emitted", "first", "last")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.first = self.last = 0.0
        self.emitted = 0


class _Prompts:
    """Recent prompt lengths, for the worst-case new request."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self.worst = FIRST_WORST_PROMPT

    def add(self, tokens: int) -> None:
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        if len(self._recent) > PROMPTS_REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self.worst = self._sorted[int(WORST_PROMPT_QUANTILE * (len(self._sorted) - 1))]


class ServingMixin:
    """Mixed into vLLM's schedulers; `self` is also a `Scheduler`."""

    device: Device | None = None
    requests: dict[str, Any]
    max_num_scheduled_tokens: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.options = options_from(vllm_config.additional_config, ServingOptions)
        self._promise: Slo = self.options.promise
        self._lendable: Slo = self.options.lendable(self._promise)
        self._lives: dict[str, _Life] = {}
        self._prompts = _Prompts()
        self._facts = ServingFacts()
        self._step: tuple[Step, float] | None = None
        self._claim = 0
        self._claim_revision = 0
        self._claimant: Writer | None = None
        self._peer = Peer()
        self._bell_seen = -1
        self._looked_at = 0.0
        self._page_broken = False
        self._news_for_rollout = False
        self._handing_over = False
        try:
            page = Page.create(
                Path(self.options.page), kv_total=self.options.kv_total, device=self.options.device
            )
        except (PageError, OSError) as error:
            logger.error("rose: serving without lending: %s", error)
            return
        self.device = Device(self, self.options, page)
        with self.device.lock:
            now = time.monotonic()
            self._respect_claim(now, force=True)
            while self._handing_over:
                self._respect_claim(now, force=True)
            self._look()
            self._publish(now)
        self.device.watch("serving", self._while_idle, LIVENESS_S)

    def add_request(self, request: Any) -> None:
        if (device := self.device) is None:
            super().add_request(request)  # type: ignore[misc]
            return
        with device.lock:
            super().add_request(request)  # type: ignore[misc]
            began = time.thread_time()
            now = time.monotonic()
            queued_before = max(0.0, time.time() - request.arrival_time)
            self._lives[request.request_id] = _Life(now - queued_before)
            self._prompts.add(request.num_prompt_tokens)
            self._look()
            self._publish(now)
            device.overhead.add(time.thread_time() - began)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if (device := self.device) is None:
            return super().schedule(throttle_prefills)  # type: ignore[misc]
        device.place_threads()
        with device.lock:
            began = time.thread_time()
            self._respect_claim(time.monotonic())
            spent = time.thread_time() - began
            output = super().schedule(throttle_prefills)  # type: ignore[misc]
            began = time.thread_time()
            now = time.monotonic()
            step = step_of(self.requests, output)
            if step.tokens:
                self._publish(now, step_ends=now + device.latency.upper(step))
                self._step = (step, device.seconds())
            device.overhead.add(spent + time.thread_time() - began)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if (device := self.device) is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        with device.lock:
            began = time.thread_time()
            if self._step is not None:
                step, started = self._step
                device.latency.observe(step, device.seconds() - started)
                self._step = None
            spent = time.thread_time() - began
            outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
            began = time.thread_time()
            now = time.monotonic()
            self._count_tokens(scheduler_output.num_scheduled_tokens, now)
            self._look()
            self._publish(now)
            device.overhead.add(spent + time.thread_time() - began)
            device.overhead.end_step()
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        if (device := self.device) is None:
            return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        with device.lock:
            ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
            for request in ended:
                self._lives.pop(request.request_id, None)
            now = time.monotonic()
            self._look()
            self._publish(now)
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        if (device := self.device) is None:
            return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
        with device.lock:
            usable = device.parking.usable
            device.parking.set_usable(device.parking.blocks)
            done = bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
            device.parking.set_usable(usable)
        return done

    def _count_tokens(self, request_ids: Iterable[str], now: float) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                self._lives.pop(request_id, None)
                continue
            life = self._lives[request_id]
            if request.num_output_tokens > life.emitted:
                if not life.emitted:
                    life.first = now
                life.last = now
                life.emitted = request.num_output_tokens

    def _look(self) -> None:
        """Recompute the facts from the requests that are here."""
        assert self.device is not None
        promise, credit = self._lendable, self.options.credit_ms / 1000.0
        due = first_due = last_tokens = NEVER
        pending = decode = starting = context = waiting_tokens = 0
        for request_id, life in self._lives.items():
            request = self.requests[request_id]
            computed = request.num_computed_tokens
            context += computed
            if life.emitted:
                decode += 1
                due = min(
                    due,
                    slo.next_token_deadline(life.first, life.last, life.emitted, promise, credit),
                )
                last_tokens = min(last_tokens, life.last)
            else:
                starting += 1
                pending += request.num_prompt_tokens - computed
                first_due = min(first_due, slo.first_token_deadline(life.arrival, promise))
                waiting_tokens += request.num_tokens - computed + self.block_size  # type: ignore[attr-defined]
        latency, most = self.device.latency, self.max_num_scheduled_tokens
        queue = Queue(decode, starting, pending, context)
        next_step, clear = bounds(queue, latency, most, promise.tpot_s)
        worst = min(
            self._prompts.worst, max(1, latency.prefill_within(GUARDED * promise.ttft_s, 0, 0))
        )
        joined = queue.joined_by(worst)
        next_with_new, clear_with_new = bounds(joined, latency, most, promise.tpot_s)
        parking = self.device.parking
        used = parking.used * parking.block_bytes
        waiting_blocks = waiting_tokens // self.block_size  # type: ignore[attr-defined]
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        self._facts = ServingFacts(
            tick=self._facts.tick + 1,
            running=running,
            waiting=waiting,
            decode_deadline=due,
            prefill_deadline=first_due,
            tight_decode_deadline=last_tokens + self._promise.tpot_s,
            next_step_s=next_step if queue.decode or queue.starting else 0.0,
            clear_s=clear if queue.decode or queue.starting else 0.0,
            next_step_with_new_s=next_with_new,
            clear_with_new_s=clear_with_new,
            ttft_s=promise.ttft_s,
            tpot_s=promise.tpot_s,
            kv_used=used,
            kv_need=used + waiting_blocks * parking.block_bytes,
            kv_max=parking.blocks * parking.block_bytes,
            worst_prompt=worst,
            overhead_us=self.device.overhead.mean_us,
            latency_error=latency.error,
            latency_coverage=latency.coverage,
        )

    def _publish(self, now: float, step_ends: float = 0.0) -> None:
        """Write the facts; wake the rollout engine, unless a step begins: that grants nothing."""
        assert self.device is not None
        page, parking = self.device.page, self.device.parking
        facts = self._facts = msgspec.structs.replace(
            self._facts,
            step_began=now if step_ends else 0.0,
            step_ends=step_ends,
            kv_quota=parking.usable_bytes,
            kv_acked=self._claim_revision,
        )
        try:
            page.publish("serving", facts)
            if self._claim and not step_ends:
                page.ring("gate")
            if self._news_for_rollout:
                self._news_for_rollout = False
                page.ring("watch")
            if self._claim and page.kv_total - self._claim - facts.kv_need < self._low_water():
                page.ring("watch")
                self._lift_rollout()
        except OSError as error:
            if not self._page_broken:
                logger.error("rose: cannot write the page any more: %s", error)
            self._page_broken = True

    def _low_water(self) -> float:
        """Where the policy cuts rollout. Lifting it any earlier would only take compute from us."""
        return self.options.headroom * self.options.kv_total * (1.0 - WATERMARK)

    def _lift_rollout(self) -> None:
        """Priority inheritance by hand: let the rollout engine give back the memory we need."""
        if (reading := self._rollout()) is not None and reading.facts.preemptible:
            priority.lift(reading.writer.pid)

    def _rollout(self) -> Reading[RolloutFacts] | None:
        assert self.device is not None
        return self.device.page.rollout()

    def _while_idle(self) -> bool:
        """From the watcher thread; True when there is more memory to hand over.

        Publishes in any case: so a page that somebody damaged heals also while serving is idle.
        """
        began, ends = self._facts.step_began, self._facts.step_ends
        if self._respect_claim(time.monotonic(), force=self._handing_over):
            self._look()
        self._publish(began, ends)
        return self._handing_over

    def _respect_claim(self, now: float, force: bool = False) -> bool:
        """Keep the quota at what the rollout engine's claim leaves; True when something changed."""
        device = self.device
        assert device is not None
        bell = device.page.bell("serving")
        if bell == self._bell_seen and now - self._looked_at < LIVENESS_S and not force:
            return False
        self._bell_seen, self._looked_at = bell, now
        renewed = self._renew_promise()
        reading = self._rollout()
        if reading is not None and self._peer.alive(reading.writer):
            claim, revision = reading.facts.kv_claim, reading.facts.kv_revision
            self._claimant = reading.writer
        elif self._claimant is not None and self._claimant.alive:
            return renewed  # torn, lying or emptied half of a live engine: keep what is in force
        elif reading is None and device.page.rollout_writer_alive():
            claim, revision = device.page.kv_total, 0  # never read yet: assume the worst
        else:
            claim, revision = 0, 0
        if (claim, revision) == (self._claim, self._claim_revision) and not force:
            return renewed
        parking = device.parking
        quota = serving_quota(
            device.page.kv_total,
            claim,
            self.options.headroom,
            parking.blocks * parking.block_bytes,
        )
        wanted = quota // parking.block_bytes
        slice_end = max(wanted, parking.usable - max(1, SLICE // parking.block_bytes))
        reached = parking.set_usable(slice_end)
        self._handing_over = reached == slice_end > wanted
        if reached > wanted:
            return True  # more to park, or requests hold it: not acknowledged, rollout waits
        self._claim, self._claim_revision = claim, revision
        self._news_for_rollout = True
        return True

    def _renew_promise(self) -> bool:
        """Take over an SLO that the node has changed since this engine started."""
        assert self.device is not None
        reading = self.device.page.node()
        if reading is None or not (reading.facts.ttft_ms and reading.facts.tpot_ms):
            return False
        promise = Slo(reading.facts.ttft_ms / 1000.0, reading.facts.tpot_ms / 1000.0)
        if promise == self._promise:
            return False
        self._promise, self._lendable = promise, self.options.lendable(promise)
        return True


class ServingScheduler(ServingMixin, Scheduler):
    """For engines without asynchronous scheduling (CPU)."""


class AsyncServingScheduler(ServingMixin, AsyncScheduler):
    """For GPU engines, which schedule asynchronously. Not yet run on a GPU."""
