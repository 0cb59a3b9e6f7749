"""The node agent: owns the engines of one device, and is what an SRE or a scheduler talks to.

It starts (or attaches to) the serving engine, pre-deploys the rollout engine dormant, and carries
out activate / drain / revoke by writing orders on the page. It is not in any hot path: serving and
rollout settle compute and memory between themselves. When it dies, serving goes on, the rollout
engine lets go of the device after `rollout.NODE_GRACE_S`, and a restarted node finds both again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import aiohttp
import msgspec

from rose.cluster import profiles
from rose.cluster.config import ConfigError, NodeConfig, check_fits, check_slo
from rose.cluster.engine import Engine, attached, free_port
from rose.cluster.memo import Memo
from rose.cluster.suspicion import Suspicion, lift_rollout
from rose.executor import priority
from rose.executor.admission import RULES
from rose.executor.facts import LeaseState, NodeOrders, RolloutFacts
from rose.executor.memory import POLICIES
from rose.executor.page import Page, PageError, Reading
from rose.executor.priority import Preemption
from rose.executor.slo import Slo

log = logging.getLogger("rose.node")

SUPERVISE_S = 0.2
ORDER_S = 10.0
"""A rollout engine that has not carried out an order after this long is killed."""
RESTART_S = 2.0
"""Pause before a dead engine is started again, doubled each time up to a minute."""


class Node:
    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.preemption: Preemption | None = None
        self.rule = config.rollout.rule
        self.memory_policy: str = config.rollout.memory_policy
        self.error_budget = config.serving.error_budget if config.serving else 0.0
        self.preemptible = True
        """Whether to use sub-step preemption where the host has it."""
        self.slo: Slo | None = None
        self.serving: Engine | None = None
        self.rollout: Engine | None = None
        self.ready = False
        self.url = ""
        self._offered = True
        self.restarts = {"serving": 0, "rollout": 0}
        self.last_activate_s = 0.0
        self.last_revoke_s = 0.0
        self._suspicion = Suspicion()
        self._orders = NodeOrders()
        self._memo = Memo(config.page_path.with_suffix(".json"))
        self._pause = {"serving": RESTART_S, "rollout": RESTART_S}
        self._reviving: set[str] = set()
        self._lock = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def offered(self) -> bool:
        """A scheduler may borrow the device: not after it was taken back, until lent again. A node
        that is started again remembers."""
        return self._offered

    @offered.setter
    def offered(self, value: bool) -> None:
        self._offered = value
        self._remember()

    def _remember(self) -> None:
        self._memo.remember([self.serving, self.rollout], offered=self._offered)

    # ---- start and stop

    async def start(self) -> None:
        config = self.config
        check_fits(config)
        found = self._memo.recall(config.device)
        self._offered = self._memo.offered
        serving_port = rollout_port = 0
        if config.serving is not None and not config.serving.attach and "serving" not in found:
            serving_port = free_port(config.serving.port, "serving.port")
        if "rollout" not in found:
            rollout_port = free_port(config.rollout.port, "rollout.port")
        self._profiles = await profiles.ensure(config)
        if config.serving is not None:
            check_slo(
                config.serving.ttft_ms,
                config.serving.tpot_ms,
                config.serving.slo_margin,
                self._profiles["serving"].profile,
            )
        self.preemption = await asyncio.to_thread(self._try_preemption)
        try:
            self.page = Page.create(
                config.page_path, kv_total=config.kv_total, device=config.device
            )
        except PageError as error:
            raise ConfigError(str(error)) from error
        self._orders = self._orders_left(found)
        self.session = await self._stack.enter_async_context(aiohttp.ClientSession())
        try:
            self.serving = self._serving(found, serving_port)
            self.rollout = found.get("rollout") or self._start("rollout", rollout_port)
            self._remember()
            waits = [
                engine.ready(self.session) for engine in (self.serving, self.rollout) if engine
            ]
            await asyncio.gather(*waits)
            self._keep_off_device()
            self._check_attached()
            if "rollout" not in found:
                await self._warm_up()
        except TimeoutError as error:
            await self.stop()
            raise ConfigError(f"{error}; see {self.config.log_dir}/rollout.log") from error
        except BaseException:
            await self.stop()
            raise
        self.ready = True
        self._tasks.append(asyncio.create_task(self._supervise()))
        log.info("node ready", extra={"facts": self.status()})

    def _orders_left(self, found: dict[str, Engine]) -> NodeOrders:
        """Go on where an earlier node ended; a lease that its engine still holds is kept, unless
        the device was taken back."""
        reading, rollout = self.page.node(), self.page.rollout()
        left = reading.facts if reading is not None else NodeOrders()
        held = "rollout" in found and rollout is not None and self._offered
        state = rollout.facts.state if held and rollout is not None else LeaseState.DORMANT
        orders = msgspec.structs.replace(left, epoch=left.epoch + 1, state=state)
        self.page.publish("node", orders)
        return orders

    def _serving(self, found: dict[str, Engine], port: int) -> Engine | None:
        if self.config.serving is None:
            return None
        if self.config.serving.attach:
            return attached(self.config.serving)
        return found.get("serving") or self._start("serving", port)

    def _start(self, role: str, port: int) -> Engine:
        return Engine.start(self.config, role, port, self._options(role))

    def _check_attached(self) -> None:
        """An attached serving engine must be on this page, else nothing protects it."""
        if self.config.serving is None or not self.config.serving.attach:
            return
        reading = self.page.serving()
        if reading is None or not reading.writer.alive:
            raise ConfigError(
                f"serving.attach: the engine at {self.config.serving.attach} does not write to "
                f"page {self.config.page_path}; start it with rose's options (docs/sre.md)"
            )

    def _keep_off_device(self) -> None:
        for engine in (self.serving, self.rollout):
            if engine is not None and engine.pid and self.config.where.cores:
                engine.keep_to(self.config.where.host_cores)
        if self.serving is not None and self.rollout is not None and self.rollout.pid:
            self.rollout.yield_host()

    async def _warm_up(self) -> None:
        """The first steps of a fresh engine are slow, and what asks for log-probs is compiled when
        it is first met, for one turn and for several: take them now, then sleep."""
        await self.activate()
        await self._first_steps()
        await self.revoke()

    async def _first_steps(self) -> None:
        assert self.rollout is not None
        url, model = f"{self.rollout.url}/v1/completions", self.config.rollout.model
        for turns in (1, 3):
            prompts = [[5, 6, 7, 8 + turn] for turn in range(turns)]
            body = {"model": model, "prompt": prompts, "max_tokens": 4, "logprobs": 1}
            async with self.session.post(url, json=body) as answer:
                if answer.status != 200:
                    said = await answer.text()
                    raise ConfigError(f"the rollout engine fails to generate: {said}")

    async def stop(self) -> None:
        """End everything this node started; an attached serving engine is left alone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        mine = [e for e in (self.rollout, self.serving) if e is not None and e.pid]
        cores = {e.role: self.core(e.role) for e in mine}
        await asyncio.gather(*(e.stop(also=cores[e.role]) for e in mine))
        if self.config.serving is None or not self.config.serving.attach:
            self.config.page_path.unlink(missing_ok=True)
        self._memo.forget()
        await self._stack.aclose()

    def core(self, role: str) -> int | None:
        """The pid of an engine's core process, as it says on the page."""
        reading: Reading[Any] | None = (
            self.page.serving() if role == "serving" else self.page.rollout()
        )
        return reading.writer.pid if reading is not None and reading.writer.alive else None

    # ---- orders

    async def activate(self) -> float:
        self.last_activate_s = await self._order(LeaseState.ACTIVE, LeaseState.ACTIVE)
        return self.last_activate_s

    async def revoke(self) -> float:
        self.last_revoke_s = await self._order(LeaseState.DORMANT, LeaseState.DORMANT)
        return self.last_revoke_s

    async def drain(self) -> float:
        return await self._order(LeaseState.DRAINING, None)

    async def _order(self, state: LeaseState, until: LeaseState | None) -> float:
        """Write an order, help it along, and wait until the engine says it is carried out."""
        began = time.monotonic()
        async with self._lock:
            self._orders = self._next_orders(state)
            self.page.publish("node", self._orders)
            self.page.ring("watch")
            self.page.ring("gate")
            epoch = self._orders.epoch
        if state == LeaseState.DORMANT:
            lift_rollout(self.page)
        while time.monotonic() - began < ORDER_S:
            seen = self.page.bell("node")
            reading = self.page.rollout()
            if reading is not None and reading.writer.alive and reading.facts.epoch >= epoch:
                facts = reading.facts
                settled = state != LeaseState.DORMANT or facts.running + facts.waiting == 0
                if settled and until in (None, LeaseState(facts.state)):
                    return time.monotonic() - began
            elif state == LeaseState.DORMANT and (self.rollout is None or not self.rollout.alive):
                return time.monotonic() - began  # a dead engine holds nothing
            await asyncio.to_thread(self.page.wait, "node", seen, 0.05)
        if state == LeaseState.DORMANT:
            await self._kill_rollout("it did not carry out a revocation")
            return time.monotonic() - began
        raise TimeoutError(f"the rollout engine is not {state.name.lower()} after {ORDER_S:.0f} s")

    def _next_orders(self, state: LeaseState) -> NodeOrders:
        preempt = self.preemption.delay_s if self.preemption and self.preemptible else 0.0
        rule = list(RULES).index(self.rule)
        slo = (self.slo.ttft_s * 1e3, self.slo.tpot_s * 1e3) if self.slo else (0.0, 0.0)
        policy = POLICIES.index(self.memory_policy)
        epoch = self._orders.epoch + 1
        budget = self.error_budget
        return NodeOrders(epoch, state, rule, int(preempt * 1e6), policy, *slo, budget)

    def promise(self, slo: Slo) -> None:
        """Change serving's SLO without restarting it."""
        if self.config.serving is None:
            raise ConfigError(f"device {self.config.device} serves nobody: it has no SLO")
        check_slo(
            slo.ttft_s * 1e3,
            slo.tpot_s * 1e3,
            self.config.serving.slo_margin,
            self._profiles["serving"].profile,
        )
        self.slo = slo
        self._orders = self._next_orders(LeaseState(self._orders.state))
        self.page.publish("node", self._orders)
        self.page.ring("serving")

    # ---- supervision

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(SUPERVISE_S)
            try:
                await self._look_after()
            except Exception:
                log.exception("supervision failed; going on")

    async def _look_after(self) -> None:
        if self.page.mend():
            log.error("the page was damaged", extra={"facts": {"page": str(self.page.path)}})
            self.page.publish("node", self._orders)
        if self.rollout and (why := self._suspicion.stuck(self.page, time.monotonic())):
            await self._kill_rollout(why)
        for role in ("serving", "rollout"):
            engine: Engine | None = getattr(self, role)
            if engine is None or not engine.pid or engine.alive or role in self._reviving:
                continue
            log.error("engine died", extra={"facts": {"role": role, "log": str(engine.log)}})
            await engine.stop(also=self.core(role), gently=False)
            if role == "rollout" and not self.config.restart_rollout:
                self.rollout = None
                continue
            self._reviving.add(role)
            self._tasks.append(asyncio.create_task(self._revive(role, engine)))

    async def _revive(self, role: str, dead: Engine) -> None:
        """Start a dead engine again, beside the watch over the other one."""
        self.ready = False
        try:
            await asyncio.sleep(self._pause[role])
            self._pause[role] = min(60.0, 2 * self._pause[role])
            await self._restart(role, dead)
        finally:
            self._reviving.discard(role)
            self.ready = not self._reviving

    async def _restart(self, role: str, dead: Engine) -> None:
        port = int(dead.url.rpartition(":")[2])
        if role == "rollout":
            self._orders = self._next_orders(LeaseState.DORMANT)
            self.page.publish("node", self._orders)
        fresh = self._start(role, port)
        setattr(self, role, fresh)
        self.restarts[role] += 1
        self._remember()
        try:
            await fresh.ready(self.session)
            self._keep_off_device()
            if role == "rollout":
                await self._warm_up()
        except (ConfigError, TimeoutError, aiohttp.ClientError) as error:
            log.error("restart failed", extra={"facts": {"role": role, "why": str(error)}})

    async def _kill_rollout(self, why: str) -> None:
        if self.rollout is None:
            return
        log.error("killing the rollout engine", extra={"facts": {"why": why}})
        self._suspicion = Suspicion()
        await self.rollout.stop(also=self.core("rollout"), gently=False)

    # ---- facts for people and other processes

    def _try_preemption(self) -> Preemption | None:
        """Find out whether sub-step preemption works on this host, and say so."""
        wanted = self.config.rollout.preemption
        device = self.config.where
        if self.config.serving is None or wanted == "none" or not device.cores:
            return None
        found = priority.measure(device.cores[0])
        log.info(str(found)) if found.works else log.warning(str(found))
        if wanted == "idle" and not found.works:
            raise ConfigError(f"rollout.preemption = 'idle': {found}; use 'auto' or 'none'")
        return found if found.works else None

    def _options(self, role: str) -> dict[str, Any]:
        config = self.config
        device = config.where
        options: dict[str, Any] = {
            "device": config.device,
            "page": str(config.page_path),
            "kv_total": config.kv_total,
            "profile": str(self._profiles[role].path),
            "headroom": config.headroom,
            "device_cores": device.cores,
            "host_cores": device.host_cores if device.cores else (),
        }
        if role == "serving":
            assert config.serving is not None
            names = ("ttft_ms", "tpot_ms", "credit_ms", "slo_margin")
            return options | {name: getattr(config.serving, name) for name in names}
        return options | {"dedicated": config.serving is None}

    def rollout_facts(self) -> Reading[RolloutFacts] | None:
        return self.page.rollout()

    def status(self) -> dict[str, Any]:
        rollout = self.page.rollout()
        state = LeaseState(rollout.facts.state) if rollout else LeaseState.DORMANT
        return {
            "device": self.config.device,
            "ready": self.ready,
            "state": state.name.lower(),
            "ordered": LeaseState(self._orders.state).name.lower(),
            "preemption": str(self.preemption) if self.preemption else "none: gate alone",
            "serving": _shown(self.serving),
            "rollout": _shown(self.rollout),
            "restarts": self.restarts,
            "offered": self.offered,
        }


def _shown(engine: Engine | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    return {"url": engine.url, "pid": engine.pid, "alive": not engine.pid or engine.alive}
