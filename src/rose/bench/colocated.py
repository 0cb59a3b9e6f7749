"""Run serving load and rollouts on one co-serving node under a mode, and measure both.

A *mode* is a way to share the device: who may run, under which admission rule, with or without
sub-step preemption. All modes of a run use the same two engines and the same arrivals.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import psutil

from rose.bench import arrivals, hits, load, rollouts
from rose.bench.arrivals import LogNormal
from rose.bench.cpu import thread_seconds
from rose.bench.hits import PrefixHits
from rose.bench.rollouts import RolloutPlan, RolloutRecord
from rose.bench.stats import Sample
from rose.bench.traffic import VOCABULARY, Traffic, Users
from rose.cluster.node import Node
from rose.executor.facts import RolloutFacts, ServingFacts
from rose.executor.slo import Slo

WARM_S = 3.0
"""Rollouts run this long before the measured window, so that their batch is full."""
SAMPLE_S = 0.2
STOLEN_S = 0.03
"""A virtual machine's host that takes this much CPU time between two looks disturbs requests."""


FORGOTTEN_S = 10.0
"""Serving counts its warm prefixes several times a second."""


@dataclass(frozen=True)
class Mode:
    name: str
    serving: bool = True
    rollout: bool = True
    rule: str = "rose"
    preemption: bool = False
    error_budget: float = 0.0


MODES = {
    mode.name: mode
    for mode in (
        Mode("serving_alone", rollout=False),
        Mode("serving_again", rollout=False),
        Mode("rollout_alone", serving=False, rule="share_all"),
        Mode("share_all", rule="share_all"),
        Mode("static_split", rule="static_split"),
        Mode("rose", preemption=True),
        Mode("rose_gate", error_budget=0.005),
        Mode("rose_strict"),
        Mode("idle_gate", rule="idle_gate"),
        Mode("paper_slack", rule="paper_slack"),
    )
}


SHORT = LogNormal(5, 0.3, 12)
CHAT = LogNormal(24, 0.4, 60)
"""Answers so long that serving nearly always has a request or two: full time, not full batches."""


@dataclass(frozen=True)
class Workload:
    """What serving users send, and what the RL job does meanwhile."""

    rate: float
    bursty: bool = False
    prompt: LogNormal = field(default=LogNormal(16, 0.5, 48))
    output: LogNormal = SHORT
    rollouts: RolloutPlan = field(
        default=RolloutPlan(
            in_flight=16,
            turns=4,
            prompt_tokens=LogNormal(32, 0.5, 96),
            turn_tokens=LogNormal(24, 0.6, 96),
            observation_tokens=LogNormal(8, 0.5, 24),
            think_s=0.2,
            vocab=VOCABULARY,
        )
    )
    warm_s: float = WARM_S

    def traffic(self, seconds: float, seed: int) -> Traffic:
        return Traffic(self.requests(seconds, seed), load.Prompts(seed, VOCABULARY))

    def requests(self, seconds: float, seed: int) -> list[arrivals.Request]:
        rng = np.random.default_rng(seed)
        if self.bursty:
            # At about one request a second, bursts show over a few seconds, not within one.
            times = arrivals.bursty(
                self.rate, seconds, rng, peak=4.0, burst_s=3.0, cycle_s=20.0, window_s=3.0
            )
        else:
            times = arrivals.poisson(self.rate, seconds, rng)
        return arrivals.schedule(times, self.prompt, self.output, rng)


@dataclass(frozen=True)
class Moment:
    """One look at the page, for the timeline."""

    at_s: float
    serving: ServingFacts
    rollout: RolloutFacts
    stolen_s: float = 0.0
    """CPU time so far that the machine's host gave to somebody else."""


@dataclass
class Run:
    """One mode, one window."""

    mode: str
    seconds: float
    samples: list[Sample] = field(default_factory=list)
    kinds: dict[int, str] = field(default_factory=dict)
    """Of the requests, by index, where they are to be told apart."""
    prefixes: PrefixHits = field(default=PrefixHits())
    """Of serving, in the window."""
    kv_total: int = 0
    rollout: RolloutRecord | None = None
    rollout_tokens: int = 0
    serving_cpu: float = 0.0
    """Share of the window that serving computed on the device."""
    rollout_cpu: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    began: float = 0.0
    produced: list[tuple[float, int]] = field(default_factory=list)
    """Rollout tokens as they come, with their time."""

    def of_kinds(self) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = {kind: [] for kind in self.kinds.values()}
        for sample in self.samples:
            if sample.index in self.kinds:
                found[self.kinds[sample.index]].append(sample)
        return found

    @property
    def undisturbed(self) -> list[Sample]:
        """Requests during which the machine's host took no noticeable time away."""
        thefts = [
            (before.at_s, after.at_s)
            for before, after in pairwise(self.moments)
            if after.stolen_s - before.stolen_s >= STOLEN_S
        ]
        return [
            sample
            for sample in self.samples
            if not any(sample.scheduled_s < e and sample.finish_s > b for b, e in thefts)
        ]


async def run_mode(
    node: Node,
    mode: Mode,
    users: Users,
    seconds: float,
    slo: Slo,
    seed: int,
    watch: Callable[[Run], None] | None = None,
) -> Run:
    """`watch` is shown the run as it starts, and may read it while it grows."""
    run = Run(mode.name, seconds, kv_total=node.page.kv_total)
    if watch is not None:
        watch(run)
    node.rule = mode.rule
    node.preemptible = mode.preemption
    node.error_budget = mode.error_budget
    stop = asyncio.Event()
    rolling: asyncio.Task[RolloutRecord] | None = None
    assert node.serving is not None and node.rollout is not None
    traffic = users.traffic(seconds, seed) if mode.serving else None
    if mode.rollout:
        if not mode.serving:
            await dedicate(node)
        await node.activate()
        plan = replace(users.rollouts, seed=seed)
        rolling = asyncio.create_task(
            rollouts.drive(
                node.rollout.url,
                plan,
                stop,
                model=node.config.rollout.model,
                on_tokens=lambda _, tokens: run.produced.append((time.monotonic(), tokens)),
            )
        )
        await asyncio.sleep(max(0.0, users.warm_s - (traffic.lead_s if traffic else 0.0)))
    watching = asyncio.create_task(_watch(node, run, stop))
    if traffic is not None:
        await _serve(node, run, traffic, seconds, slo)
    else:
        async with _window(node, run):
            await asyncio.sleep(seconds)
    stop.set()
    await watching
    if rolling is not None:
        run.rollout = await rolling
        offset = run.began - run.rollout.started
        run.rollout_tokens = sum(
            tokens for at, tokens in run.rollout.arrivals if offset <= at <= offset + run.seconds
        )
        await node.revoke()
    return run


async def _serve(node: Node, run: Run, traffic: Traffic, seconds: float, slo: Slo) -> None:
    """Send everything; what arrives after the lead is the window."""
    assert node.serving is not None
    url, lead_s = node.serving.url, traffic.lead_s
    run.kinds = dict(enumerate(traffic.kinds))

    def keep(sample: Sample) -> None:
        if sample.scheduled_s >= lead_s:
            run.samples.append(sample.since(lead_s))

    async with load.open_session() as session:
        target = await load.connect(session, url, prompts=load.Prompts(vocab=VOCABULARY))
        # What an earlier window has left in the prefix cache must not help this one.
        salted = replace(target, extras=target.extras | {"cache_salt": uuid.uuid4().hex})
        before = await hits.read(session, url)
        sending = asyncio.create_task(
            load.run(
                session, salted, traffic.requests, slo=slo, prompts=traffic.prompts, on_sample=keep
            )
        )
        try:
            if lead_s:
                await asyncio.sleep(lead_s)
                before = await hits.read(session, url)
            async with _window(node, run):
                ends = run.began + seconds
                await sending
                await asyncio.sleep(max(0.0, ends - asyncio.get_running_loop().time()))
            run.prefixes = await hits.read(session, url) - before
        finally:
            sending.cancel()
    run.samples.sort(key=lambda sample: sample.index)


@asynccontextmanager
async def _window(node: Node, run: Run) -> AsyncIterator[None]:
    """The measured time, and the shares of it that the engines computed."""
    now = asyncio.get_running_loop().time
    cores = {role: node.core(role) for role in ("serving", "rollout")}
    before = {role: thread_seconds(pid) or 0.0 for role, pid in cores.items()}
    run.began = now()
    yield
    run.seconds = now() - run.began
    spent = {role: (thread_seconds(pid) or 0.0) - before[role] for role, pid in cores.items()}
    run.serving_cpu = spent["serving"] / run.seconds
    run.rollout_cpu = spent["rollout"] / run.seconds


async def _watch(node: Node, run: Run, stop: asyncio.Event) -> None:
    while not stop.is_set():
        serving, rollout = node.page.serving(), node.page.rollout()
        if serving is not None and rollout is not None and run.began:
            at = asyncio.get_running_loop().time() - run.began
            stolen = getattr(psutil.cpu_times(), "steal", 0.0)  # Linux only
            run.moments.append(Moment(at, serving.facts, rollout.facts, stolen))
        await asyncio.sleep(SAMPLE_S)


async def dedicate(node: Node) -> None:
    """Empty serving's prefix cache: rollouts alone have the memory that a dedicated device has. The
    engine has to have been started with vLLM's development routes."""
    assert node.serving is not None
    async with node.session.post(f"{node.serving.url}/reset_prefix_cache") as answer:
        answer.raise_for_status()
    deadline = time.monotonic() + FORGOTTEN_S
    while (reading := node.page.serving()) is None or reading.facts.kv_warm:
        if time.monotonic() > deadline:
            raise RuntimeError("serving still keeps prefixes after its cache was emptied")
        await asyncio.sleep(0.02)


async def settle(node: Node, quiet_s: float = 1.0) -> None:
    """Wait until serving has nothing left to do."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < quiet_s:
        reading = node.page.serving()
        if reading is None or reading.facts.busy:
            quiet_since = time.monotonic()
        await asyncio.sleep(0.05)
