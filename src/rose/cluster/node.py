"""The node agent: owns the engines of one device, and is what an SRE or a scheduler talks to.

It starts (or attaches to) the serving engine, pre-deploys the rollout engine dormant, and carries
out activate / drain / revoke by writing orders on the page (`custody` decides which). It repeats
them: orders that grow old end. It is not in any hot path: serving and rollout settle compute and
memory between themselves. When it dies, serving goes on, the rollout engine lets go of the device
after `borrower.NODE_GRACE_S`, and a restarted node finds both again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import aiohttp

from rose.cluster import profiles
from rose.cluster.config import ConfigError, NodeConfig, check_fits, check_slo
from rose.cluster.custody import (
    Custody,
    Overtaken,
    Sharing,
    TakenBack,
    carried_out,
    has_memory_back,
)
from rose.cluster.engine import Engine, attached, free_port
from rose.cluster.memo import Memo
from rose.cluster.restarts import next_pause
from rose.executor import priority
from rose.executor.facts import LeaseState, MemoryPolicy, RolloutFacts, Rule
from rose.executor.page import Page, PageError, Reading
from rose.executor.priority import Preemption
from rose.executor.slo import Slo
from rose.executor.suspicion import Suspicion, starved

log = logging.getLogger("rose.node")

SUPERVISE_S = 0.2
ORDER_S = 10.0
"""A rollout engine that is not active after this long will not be."""
REVOKE_S = 2.5
"""One that holds the device this long after a revocation is killed: who takes it back waits."""
ATTACH_S = 3.0
"""An attached engine is looked for so long: after a rolling restart it is seen a second later."""
HAND_OVER_S = 0.5
"""After that serving has its memory: it hears of it within milliseconds, if it is there."""


class Node:
    def __init__(self, config: NodeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
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
        self.custody = Custody()
        self.restarts = {"serving": 0, "rollout": 0}
        self.last_activate_s = 0.0
        self.last_revoke_s = 0.0
        self.kills = 0
        self._suspicion = Suspicion()
        self._memo = Memo.of(config)
        self._started = False
        self._blind = False
        """Serving is not seen, and that was said."""
        self._pauses = {"serving": 0.0, "rollout": 0.0}
        self._engine_began = dict.fromkeys(self._pauses, self.clock())
        self._reviving: set[str] = set()
        self._lock = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def offered(self) -> bool:
        """A scheduler may borrow the device: not after it was taken back, until lent again. A node
        that is started again remembers."""
        return self.custody.offered

    @offered.setter
    def offered(self, value: bool) -> None:
        self.custody.offered = value
        self._publish()
        self._remember()

    def _remember(self) -> None:
        self._memo.remember([self.serving, self.rollout], offered=self.offered)

    def _publish(self) -> None:
        """The orders as they stand. Repeated for as long as this node lives: the page may have been
        damaged, and orders that nobody repeats end."""
        self.page.publish("node", self.custody.orders(self._sharing(), self.clock()))

    # ---- start and stop

    async def start(self) -> None:
        config = self.config
        found = self._memo.recall(config.device)
        ports = await self._prepare(found)
        try:
            self.page = self._open_page()
            if not self.page.own("node"):
                raise ConfigError(f"device {config.device} already has a node")
        except (PageError, OSError) as error:
            raise ConfigError(str(error)) from error
        await self._clear_strangers(found)
        left, rollout = self.page.node(), self.page.rollout()
        self.custody.recall(
            left.facts if left is not None else None,
            taken_back=self._memo.taken_back,
            held=rollout.facts if "rollout" in found and rollout is not None else None,
        )
        self._publish()
        self._tasks.append(asyncio.create_task(self._repeat_orders()))
        self.session = await self._stack.enter_async_context(self._session())
        try:
            self.serving = self._serving(found, ports["serving"])
            self.rollout = found.get("rollout") or self._start("rollout", ports["rollout"])
            self._remember()
            waits = [
                engine.ready(self.session) for engine in (self.serving, self.rollout) if engine
            ]
            await asyncio.gather(*waits)
            self._keep_off_device()
            await self._check_attached()
            self._tasks.append(asyncio.create_task(self._supervise()))
            if self.custody.cold:
                await self._warm_up()
        except BaseException:
            await self.stop(spare=found)
            raise
        self._started, self.ready = True, not self._reviving
        log.info("node ready", extra={"facts": self.status()})

    async def _clear_strangers(self, found: dict[str, Engine]) -> None:
        """Engines on the page that no memo knows of (it could not be written): a rollout engine
        that nobody could take back is ended, a serving engine is its users'."""
        serving, rollout = self.page.serving(), self.page.rollout()
        alive = self.page.processes.alive
        attach = self.config.serving is not None and self.config.serving.attach
        if not attach and "serving" not in found and serving and alive(serving.writer):
            raise ConfigError(
                f"page {self.page.path} already has a serving engine, process "
                f"{serving.writer.pid}, which this node did not start: stop it, or name its URL "
                "in serving.attach"
            )
        if "rollout" not in found and rollout and alive(rollout.writer):
            log.warning("ending a rollout engine that an earlier node left and nobody remembers")
            self.page.processes.kill(rollout.writer)
            for _ in range(int(REVOKE_S / 0.05)):
                if not alive(rollout.writer):
                    return
                await asyncio.sleep(0.05)

    async def _prepare(self, found: dict[str, Engine]) -> dict[str, int]:
        """All that can be refused before anything is started; ports of engines to start."""
        config = self.config
        check_fits(config)
        ports = {"serving": 0, "rollout": 0}
        if config.serving is not None and not config.serving.attach and "serving" not in found:
            ports["serving"] = free_port(config.serving.port, "serving.port")
        if "rollout" not in found:
            ports["rollout"] = free_port(config.rollout.port, "rollout.port")
        self._profiles = await profiles.ensure(config)
        if config.serving is not None:
            check_slo(
                config.serving.ttft_ms,
                config.serving.tpot_ms,
                config.serving.slo_margin,
                self._profiles["serving"].profile,
            )
        self.preemption = await asyncio.to_thread(self._try_preemption)
        return ports

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession()

    def _open_page(self) -> Page:
        config = self.config
        return Page.create(config.page_path, kv_total=config.kv_total, device=config.device)

    def _serving(self, found: dict[str, Engine], port: int) -> Engine | None:
        if self.config.serving is None:
            return None
        if self.config.serving.attach:
            return attached(self.config.serving)
        return found.get("serving") or self._start("serving", port)

    def _start(self, role: str, port: int) -> Engine:
        return Engine.start(self.config, role, port, self._options(role))

    async def _check_attached(self) -> None:
        """An attached serving engine must be on this page from the start: a mistake is told now.
        Whether it still is, is looked at before every step of rollouts."""
        if self.config.serving is None or not self.config.serving.attach:
            return
        for _ in range(int(ATTACH_S / 0.1)):
            if self.page.lending(self.clock) is not None:
                return
            await asyncio.sleep(0.1)
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
        it is first met, for one turn and for several: take them now, then sleep. On a device that
        was taken back they have to wait until it is lent again."""
        if not self.offered:
            return
        mine = self.custody.epoch + 1
        try:
            await self.activate()
        except (TimeoutError, Overtaken, TakenBack) as error:
            log.warning("first steps have to wait for a lease: %s", error)
        finally:
            if self.custody.epoch == mine:  # else somebody has ordered otherwise meanwhile
                with contextlib.suppress(Overtaken):
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

    async def stop(self, spare: Collection[str] = ()) -> None:
        """End everything this node started; an attached serving engine is left alone, and so are
        engines of an earlier node (`spare`) when this one does not come up.

        That the device was taken back stays known; if no disk takes it, the page stays for it.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.offered:
            self._remember()
        both = (self.rollout, self.serving)
        mine = [e for e in both if e is not None and e.pid and e.role not in spare]
        cores = {e.role: self.core(e.role) for e in mine}
        await asyncio.gather(*(e.stop(also=cores[e.role]) for e in mine))
        kept = spare or (not self.offered and self._memo.unwritten)
        if not kept and (self.config.serving is None or not self.config.serving.attach):
            self.config.page_path.unlink(missing_ok=True)
        if not spare:
            self._memo.forget()
        await self._stack.aclose()

    def core(self, role: str) -> int | None:
        """The pid of an engine's core process, as it says on the page."""
        if role == "rollout":
            writer = self.page.rollout_writer()
        else:
            reading = self.page.serving()
            writer = reading.writer if reading is not None else None
        return writer.pid if writer is not None and self.page.processes.alive(writer) else None

    # ---- orders

    async def lend(self) -> float:
        """The owner's word: the device may be borrowed, and is active now."""
        self.offered = True
        return await self.activate()

    async def take_back(self) -> float:
        """The owner's word: nothing runs here and nothing is held, until the device is lent again.

        The order is on the page before anything else; what remembers it comes after.
        """
        self.custody.take_back()
        try:
            return await self.revoke()
        finally:
            self._remember()

    async def activate(self) -> float:
        self.last_activate_s = await self._order(LeaseState.ACTIVE)
        if self.custody.cold:
            try:
                await self._first_steps()
            except BaseException:
                await self.revoke()  # an engine that cannot take a step is lent nothing
                raise
            self.custody.cold = False
        return self.last_activate_s

    async def revoke(self) -> float:
        self.last_revoke_s = await self._order(LeaseState.DORMANT)
        return self.last_revoke_s

    async def drain(self) -> float:
        return await self._order(LeaseState.DRAINING)

    async def _order(self, state: LeaseState) -> float:
        """Write an order, help it along, and wait until it is carried out."""
        began = self.clock()
        async with self._lock:
            self.custody.order(state)
            epoch = self.custody.epoch
            self._publish()
            self.page.ring("watch")
            self.page.ring("gate")
        revoked = state == LeaseState.DORMANT
        if revoked:
            self._lift_rollout()
        limit_s = REVOKE_S if revoked else ORDER_S
        while not self._carried_out(state, epoch):
            if self.custody.state != state:
                raise Overtaken(
                    f"before the rollout engine was {state.name.lower()}, it was ordered to be "
                    f"{self.custody.state.name.lower()}"
                )
            if self.clock() - began > limit_s:
                if not revoked:
                    raise TimeoutError(
                        f"the rollout engine is not {state.name.lower()} after {limit_s:.0f} s"
                    )
                await self._kill_rollout("it did not carry out a revocation")
                break
            seen = self.page.bell("node")
            if not self._carried_out(state, epoch):
                await self._wait(seen)
        if revoked:
            await self._hand_over()
        return self.clock() - began

    async def _wait(self, seen: int) -> None:
        """Until the rollout engine has news, or for a moment."""
        await asyncio.to_thread(self.page.wait, "node", seen, 0.02)

    def _carried_out(self, state: LeaseState, epoch: int) -> bool:
        reading = self.page.rollout()
        if reading is not None and self.page.processes.alive(reading.writer):
            return carried_out(state, epoch, reading.facts)
        # One that is dead holds nothing; one that cannot be read may.
        gone = self.rollout is None or not self.rollout.alive
        return state == LeaseState.DORMANT and gone and not self.page.rollout_writer_alive()

    async def _hand_over(self) -> None:
        """Serving hears of its memory a moment after it is back."""
        deadline = self.clock() + HAND_OVER_S
        while self.config.serving is not None and self.clock() < deadline:
            reading = self.page.serving()
            if reading is not None and (
                not self.page.processes.alive(reading.writer)
                or has_memory_back(reading.facts, self.page.kv_total)
            ):
                return
            await asyncio.sleep(0.002)

    def _lift_rollout(self) -> None:
        """Let a rollout engine in the idle class run at normal priority: somebody waits for it."""
        reading = self.page.rollout()
        if reading is not None and reading.facts.preemptible:
            priority.lift(reading.writer.pid)

    def _sharing(self) -> Sharing:
        preempt = self.preemption.delay_s if self.preemption and self.preemptible else 0.0
        return Sharing(
            rule=Rule[self.rule.upper()],
            preempt_us=int(preempt * 1e6),
            memory_policy=MemoryPolicy[self.memory_policy.upper()],
            ttft_ms=self.slo.ttft_s * 1e3 if self.slo else 0.0,
            tpot_ms=self.slo.tpot_s * 1e3 if self.slo else 0.0,
            error_budget=self.error_budget,
        )

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
        self._publish()
        self.page.ring("serving")

    # ---- supervision

    async def _repeat_orders(self) -> None:
        while True:
            try:
                self._publish()
            except OSError:
                log.exception("cannot write the page; trying again")
            await asyncio.sleep(SUPERVISE_S)

    async def _supervise(self) -> None:
        duties = (self._mend, self._look_for_serving, self._free_memory, self._revive_the_dead)
        while True:
            await asyncio.sleep(SUPERVISE_S)
            for duty in duties:
                try:
                    await duty()
                except Exception:
                    log.exception("%s failed; going on", duty.__name__.strip("_"))

    async def _mend(self) -> None:
        if self.page.mend(self.clock):
            log.error("the page was damaged", extra={"facts": {"page": str(self.page.path)}})
        if self._memo.unwritten:
            self._remember()

    async def _free_memory(self) -> None:
        """Help serving to memory that the rollout engine holds against it."""
        if starved(self.page):
            self._lift_rollout()
        dedicated = self.config.serving is None
        if why := self._suspicion.stuck(self.page, self.clock(), dedicated=dedicated):
            await self._kill_rollout(why)

    async def _revive_the_dead(self) -> None:
        for role in ("serving", "rollout"):
            engine: Engine | None = getattr(self, role)
            if engine is None or not engine.pid or engine.alive or role in self._reviving:
                continue
            log.error("engine died", extra={"facts": {"role": role, "log": str(engine.log)}})
            if not await engine.stop(also=self.core(role), gently=False):
                continue  # part of it lives on, and would be beside the next one
            if role == "rollout" and not self.config.restart_rollout:
                self.rollout = None
                continue
            self._reviving.add(role)
            self._tasks.append(asyncio.create_task(self._revive(role, engine)))

    async def _look_for_serving(self) -> None:
        """Say when a serving engine is not seen, and when it is again."""
        if self.config.serving is None or not self.ready:
            return
        blind = self.page.lending(self.clock) is None
        if blind != self._blind:
            facts = {"facts": {"page": str(self.page.path), "two": self.page.rival(self.clock())}}
            if blind:
                log.error("serving is not seen on the page: nothing is lent", extra=facts)
            else:
                log.info("serving is seen on the page again", extra=facts)
        self._blind = blind

    async def _revive(self, role: str, dead: Engine) -> None:
        """Start a dead engine again, beside the watch over the other one."""
        self.ready = False
        try:
            lived_s = self.clock() - self._engine_began[role]
            self._pauses[role] = next_pause(self._pauses[role], lived_s)
            await asyncio.sleep(self._pauses[role])
            await self._restart(role, dead)
        except Exception:
            log.exception("restart failed; trying again", extra={"facts": {"role": role}})
        finally:
            self._reviving.discard(role)
            self.ready = self._started and not self._reviving

    async def _restart(self, role: str, dead: Engine) -> None:
        port = int(dead.url.rpartition(":")[2])
        if role == "rollout":
            self.custody.engine_started()
            self._publish()
        fresh = self._start(role, port)
        self._engine_began[role] = self.clock()
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
        """Its core first, which holds the memory; then all that belongs to it."""
        log.error("killing the rollout engine", extra={"facts": {"why": why}})
        self._suspicion.start_anew()
        self.kills += 1
        core = self.core("rollout")
        for writer in filter(None, {self.page.rollout_writer(), self._suspicion.suspect}):
            self.page.processes.kill(writer)
        if self.rollout is None:
            return
        if not await self.rollout.stop(also=core, gently=False):
            raise TimeoutError(
                f"the rollout engine (pid {core or self.rollout.pid}) cannot be killed: the kernel "
                "holds it, and its memory with it"
            )

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
            "prefix_loss": config.prefix_loss,
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
            "ordered": self.custody.state.name.lower(),
            "preemption": str(self.preemption) if self.preemption else "none: gate alone",
            "serving": _shown(self.serving),
            "rollout": _shown(self.rollout),
            "restarts": self.restarts,
            "offered": self.offered,
            "serving_seen": self.page.lending(self.clock) is not None,
        }


def _shown(engine: Engine | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    return {"url": engine.url, "pid": engine.pid, "alive": not engine.pid or engine.alive}
