"""The serving engine's scheduler: stock vLLM, plus a word to the page after every step.

It decides nothing about serving: same batches, same order, same answers. The engine's thread only
notes what happened (`add_request`, `update_from_output`); the thread aside publishes facts (what
runs, what waits, deadlines, upper bounds of the next steps, prefixes worth keeping) and keeps
serving's KV quota at what the rollout engine's claim leaves. Nobody waits for anything. If the page
cannot be used the engine says so once and serves as stock vLLM does: it is not seen then, and a
device whose serving engine is not seen is not lent.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from rose.executor import priority
from rose.executor.aside import Aside
from rose.executor.bounds import LatencyBound, Queue, bounds
from rose.executor.facts import FACTS_S, ServingFacts
from rose.executor.latency import Step
from rose.executor.lender import BRING_S, Lender
from rose.executor.lives import Lives
from rose.executor.memory import low_water
from rose.executor.page import Page, PageError
from rose.executor.peak import Peak
from rose.executor.prefix_book import PrefixBook
from rose.executor.slo import Slo
from rose.executor.vllm import compat
from rose.executor.vllm.engine import Device, logger, step_of
from rose.executor.vllm.options import ServingOptions, options_from
from rose.executor.vllm.overhead import Overhead

compat.check()

WORST_PROMPT_QUANTILE = 0.99
SLICE = 16 << 20
"""Bytes parked at a time; see `Lender`."""
PULSE_S = FACTS_S / 4
"""How often facts are repeated, and the rollout engine looked at, when nothing happens."""
QUEUED_S = 60.0
"""A request has waited before this engine saw it for at most that long: more is a wall clock that
was set meanwhile."""
GUARDED = 0.5
"""Share of the first-token promise that the worst-case new prompt may need by itself. A longer one
counts as this long: else one prompt that no device could serve in time would end all lending."""


class ServingMixin:
    """Mixed into vLLM's schedulers; `self` is also a `Scheduler`."""

    device: Device | None = None
    aside: Aside
    requests: dict[str, Any]
    max_num_scheduled_tokens: int
    block_size: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.options = options_from(vllm_config.additional_config, ServingOptions)
        self.stock_schedule = super().schedule  # type: ignore[misc]
        self.stock_update = super().update_from_output  # type: ignore[misc]
        self._overhead = Overhead(self)
        self._promise: Slo = self.options.promise
        self._lendable: Slo = self.options.lendable(self._promise)
        self._lives = Lives()
        self._tick = 0
        self._taken = time.monotonic_ns() // 1000
        """The page's arrivals word, counted by the engine's thread; no other engine began there."""
        self._known = self._taken
        """How far the thread aside has come with it."""
        self._failures = 0
        """Of the thread aside, that were recovered from."""
        self._since = 0.0
        self._step_began = 0.0
        self._page_broken = False
        self._news_for_rollout = False
        self._peak = Peak()
        try:
            page = Page.create(
                Path(self.options.page), kv_total=self.options.kv_total, device=self.options.device
            )
            owns = page.own("serving")
        except (PageError, OSError) as error:
            logger.error("rose: serving without lending: %s", error)
            return
        if not owns:
            logger.warning("rose: another serving engine is on page %s; waiting", page.path)
        device = Device(self, self.options, page)
        parking = device.parking
        self._book = PrefixBook(parking.blocks, self.block_size, self.options.prefix_loss)
        self._lender = Lender(
            page,
            parking,
            self.options.headroom,
            device.guard,
            slice_bytes=SLICE,
            owns=owns,
        )
        self._lender.stand(time.monotonic())
        parking.set_usable(0)  # what is given back then is brought
        for _ in range(1 + parking.blocks * parking.block_bytes // SLICE):
            self._lender.respect(force=True)
        self.device = device
        self.aside = Aside("serving", page, self._tell, fatal=False)
        self.aside.watch("serving")

    # ---- vLLM's hooks, in the engine's thread

    def add_request(self, request: Any) -> None:
        if (device := self.device) is None:
            super().add_request(request)  # type: ignore[misc]
            return
        self._taken += 1
        if self._lender.owns:
            with contextlib.suppress(OSError):  # said by `_publish`, which cannot write either
                device.page.arrive(self._taken)
        super().add_request(request)  # type: ignore[misc]
        self.aside.post((self._arrived, (request, self._taken)))

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if (device := self.device) is None:
            return self.stock_schedule(throttle_prefills)
        if not device.placed:
            device.place_threads()
        guard = device.guard
        guard.inside += 1
        if guard.wanted:
            guard.wait()
        output = self.stock_schedule(throttle_prefills)
        guard.inside -= 1
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if (device := self.device) is None:
            return self.stock_update(scheduler_output, model_runner_output)
        guard = device.guard
        guard.inside += 1
        if guard.wanted:
            guard.wait()
        outputs = self.stock_update(scheduler_output, model_runner_output)
        guard.inside -= 1
        self.aside.post((self._stepped, (scheduler_output, time.monotonic())))
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        if (device := self.device) is None:
            return super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        device.guard.enter()
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        device.guard.leave()
        self.aside.nudge()
        return ended

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        if (device := self.device) is None:
            return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
        device.guard.enter()
        with device.parking.lifted():
            done = bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]
        device.guard.leave()
        if done:
            self.aside.post((self._book.empty, ()))
        return done

    # ---- aside: facts

    def _arrived(self, request: Any, count: int) -> None:
        now = time.monotonic()
        self._known = count
        if not self._lives:
            assert self.device is not None
            self._since, self._step_began = self.device.seconds(), now
        queued_before = min(max(0.0, time.time() - request.arrival_time), QUEUED_S)
        prompt: int = request.num_prompt_tokens
        self._lives.arrived(request.request_id, prompt, max(0.0, now - queued_before))
        self._book.begin(request.request_id, request.block_hashes, prompt, now)

    def _recover(self) -> None:
        """Something that was posted is lost: know again of every request that is here."""
        for request in list(self.requests.values()):
            if request.request_id not in self._lives and not request.is_finished():
                self._arrived(request, self._known)
        self._known, self._failures = self._taken, self.aside.failures

    def _stepped(self, output: Any, at: float) -> None:
        assert self.device is not None
        seconds = self.device.seconds()
        step, computed = step_of(output)
        if step.tokens:
            self.device.latency.observe(step, seconds - self._since)
        self._since, self._step_began = seconds, at
        self._overhead.stepped()
        for new in output.scheduled_new_reqs:
            self._book.found(new.req_id, new.num_computed_tokens)
            self._lives.begun(new.req_id, new.num_computed_tokens)
        for request_id, tokens in computed:
            if (request := self.requests.get(request_id)) is not None:
                self._lives.stepped(request_id, tokens, request.num_output_tokens, at)

    def _tell(self) -> float:
        """Aside has caught up: respect the rollout engine's claim, tell it how serving stands.

        In any case: so a page that somebody damaged heals also while serving is idle, and facts
        that stop coming mean that nothing may be lent any more.
        """
        lender = self._lender
        lender.look(time.monotonic, self._publish, self._say_killed)
        if lender.handing_over:
            return 0.0
        return BRING_S if lender.bringing else PULSE_S

    def _publish(self, news: bool) -> None:
        """Everything that serving has to say. `news`: the rollout engine waits for it."""
        assert self.device is not None
        self._news_for_rollout |= news
        now = time.monotonic()
        if self.aside.failures != self._failures:
            self._recover()
        for request_id in self._lives.names():
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                self._lives.gone(request_id)
                self._book.end(request_id, now)
        self._renew_promise()
        device = self.device
        facts = self._look(device)
        page = device.page
        try:
            while page.arrivals() != (taken := self._taken):
                page.arrive(taken)  # ours for the first time, or damaged
            page.publish("serving", facts.capped())
            if self._lender.claim:
                page.ring("gate")
            if self._news_for_rollout:
                self._news_for_rollout = False
                page.ring("watch")
            low = low_water(self.options.kv_total, self.options.headroom)
            claim = self._lender.claim
            if claim and page.kv_total - claim - facts.kv_need < low:
                page.ring("watch")
                self._lift_rollout()
            self._page_broken = False
        except OSError as error:
            if not self._page_broken:
                logger.error("rose: cannot write the page any more: %s", error)
            self._page_broken = True

    def _look(self, device: Device) -> ServingFacts:
        """The facts as of the end of the last step; the next one began at that moment."""
        now = time.monotonic()
        promise, latency, parking = self._lendable, device.latency, device.parking
        queue = self._lives.queue()
        deadlines = self._lives.deadlines(promise, self._promise, self.options.credit_ms / 1000.0)
        next_step, clear = self._bounds(latency, queue) if self._lives else (0.0, 0.0)
        guarded = max(1, int(latency.within(GUARDED * promise.ttft_s, 0).alone))
        prompts = self._lives.prompts
        worst = min(prompts.quantile(WORST_PROMPT_QUANTILE), guarded)
        next_with_new, clear_with_new = self._bounds(latency, queue.joined_by(worst))
        likely = latency.likely
        news = {
            percent: self._bounds(likely, queue.joined_by(prompts.quantile(percent / 100)))
            for percent in (25, 62, 82, 93, 98)
        }
        after = Queue(queue.decode + 1, queue.starting, queue.prefill, queue.context + worst)
        next_after_new, _ = self._bounds(latency, after)
        used = parking.used * parking.block_bytes
        coming = (queue.prefill // self.block_size + queue.starting) * parking.block_bytes
        newcomer = (worst // self.block_size + 1) * parking.block_bytes
        need = used + coming
        soon = max(need + newcomer, self._peak.of(need, now))
        started = self._lives.started
        book = self._book
        self._tick += 1
        return ServingFacts(
            tick=self._tick,
            running=started,
            waiting=len(self._lives) - started,
            decode_deadline=max(0.0, deadlines.decode),
            prefill_deadline=max(0.0, deadlines.prefill),
            tight_decode_deadline=max(0.0, deadlines.tight_decode),
            next_step_s=next_step,
            clear_s=clear,
            next_step_with_new_s=next_with_new,
            clear_with_new_s=clear_with_new,
            next_step_after_new_s=next_after_new,
            next_new_25_s=news[25][0],
            clear_new_25_s=news[25][1],
            next_new_62_s=news[62][0],
            clear_new_62_s=news[62][1],
            next_new_82_s=news[82][0],
            clear_new_82_s=news[82][1],
            next_new_93_s=news[93][0],
            clear_new_93_s=news[93][1],
            next_new_98_s=news[98][0],
            clear_new_98_s=news[98][1],
            base_s=likely.upper(Step(1, queue.decode, queue.context)),
            written=now,
            arrived=self._lives.arrivals.count,
            arrivals=self._known,
            arrival_rate=self._lives.arrivals.rate(now),
            step_began=self._step_began if self._lives else 0.0,
            step_ends=self._step_began + next_step if self._lives else 0.0,
            ttft_s=promise.ttft_s,
            tpot_s=promise.tpot_s,
            kv_used=used,
            kv_need=need,
            kv_warm=book.cache.warm(now) * parking.block_bytes,
            kv_lacks=max(0, min(soon, parking.blocks * parking.block_bytes) - parking.usable_bytes),
            prefix_tokens=book.tokens,
            prefix_hits=book.hits,
            prefix_lost=book.lost,
            prefix_loss=book.loss,
            kv_quota=parking.usable_bytes,
            kv_acked=self._lender.revision,
            kv_max=parking.blocks * parking.block_bytes,
            worst_prompt=worst,
            overhead_us=self._overhead.microseconds,
            latency_error=latency.error,
            latency_coverage=latency.coverage,
        )

    def _bounds(self, latency: LatencyBound, queue: Queue) -> tuple[float, float]:
        return bounds(queue, latency, self.max_num_scheduled_tokens, self._lendable.tpot_s)

    # ---- aside: memory

    def _lift_rollout(self) -> None:
        """Priority inheritance by hand: let the rollout engine give back the memory we need.

        Not before the policy cuts it: that would only take compute from us.
        """
        assert self.device is not None
        reading = self.device.page.rollout()
        if reading is not None and reading.facts.preemptible:
            priority.lift(reading.writer.pid)

    def _say_killed(self, why: str) -> None:
        logger.error("rose: killing the rollout engine: %s", why)

    def _renew_promise(self) -> None:
        """Take over an SLO that the node has changed since this engine started."""
        assert self.device is not None
        reading = self.device.page.node()
        if reading is not None and reading.facts.ttft_ms and reading.facts.tpot_ms:
            promise = Slo(reading.facts.ttft_ms / 1000.0, reading.facts.tpot_ms / 1000.0)
            self._promise, self._lendable = promise, self.options.lendable(promise)


class ServingScheduler(ServingMixin, Scheduler):
    """For engines without asynchronous scheduling (CPU)."""


class AsyncServingScheduler(ServingMixin, AsyncScheduler):
    """For GPU engines, which schedule asynchronously. Not yet run on a GPU."""
