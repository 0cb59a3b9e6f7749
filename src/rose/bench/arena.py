"""One RL job beside one served device, on this machine: the same work under several ways to share.

    core 1    a dedicated rollout device
    core 0    a serving device under an open-loop load, with a rollout engine that may be lent
    either    scheduler, relay, store, agents, load generator, HTTP servers: the host; and the
              trainer, who learns while nothing is sampled and serving leaves the cores idle

A *mode* says whether and how the serving device is lent. Cluster and engines stay up from mode to
mode; the trainer is a process of its own and new in each.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rose.bench import arrivals, load
from rose.bench.arrivals import LogNormal, Request
from rose.bench.cold import ColdNode
from rose.bench.cpu import Counting, Spent, thread_seconds
from rose.bench.stats import Sample, percentiles
from rose.bench.summary import SLO_FACTOR
from rose.cluster import api, cluster_config, up
from rose.cluster.config import ConfigError, parse
from rose.executor.page import Page
from rose.executor.slo import Slo
from rose.rl import report
from rose.rl.lengths import LENGTHS
from rose.rl.metrics import METRICS

NAME = "arena"
"""Of the runs, as trainers know them."""
LOOSE = Slo(20.0, 5.0)
"""Promises before any were measured."""
CORES = (0, 1)
"""Where HTTP servers may run: the other core is not the host's here, it is another device's."""
LOOK_S = 0.5
LONGEST_S = 3600.0
"""Of a run: as much load is prepared."""
CHUNKS = {"args": ["--stream-interval", "32"]}
"""Of rollout engines: tokens come a few at a time, as the host's cores are the devices' here."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Mode:
    name: str
    lent: bool = True
    rule: str = "rose"
    preemption: bool = True
    cold: bool = False
    """The rollout engine is started whenever the device is borrowed, and ended when given back."""


MODES = {
    mode.name: mode
    for mode in (
        Mode("static", lent=False),
        Mode("elastic", cold=True),
        Mode("share_all", rule="share_all", preemption=False),
        Mode("rose"),
    )
}


@dataclass(frozen=True)
class Traffic:
    """What serving users send."""

    rate: float
    prompt: LogNormal = field(default=LogNormal(48, 0.5, 160))
    output: LogNormal = field(default=LogNormal(8, 0.4, 24))
    peak: float = 4.0
    """Of the busiest second, in means."""
    recorded: tuple[Request, ...] = ()
    """A trace to replay instead, at the same mean rate."""

    def requests(self, seconds: float, seed: int) -> list[Request]:
        rng = np.random.default_rng(seed)
        if self.recorded:
            span = self.recorded[-1].arrival_s
            stretch = len(self.recorded) / span / self.rate
            times = np.array([one.arrival_s * stretch for one in self.recorded])
            times = times[times < seconds]
        else:
            times = arrivals.bursty(self.rate, seconds, rng, self.peak)
        return arrivals.schedule(times, self.prompt, self.output, rng)


@dataclass
class Run:
    """One mode, one training run."""

    mode: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the trainer's metrics."""
    samples: list[Sample] = field(default_factory=list)
    """Serving requests while it trained."""
    seed: int = 0
    """Of those."""
    window: tuple[float, float] = (0.0, 0.0)
    """Of the training steps, in seconds since the requests began."""
    lengths: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the trainer's: its episodes, see `rl.lengths`."""
    evaluation: dict[str, float] = field(default_factory=dict)
    activating_s: float = 0.0
    """Between asking for the device and its taking turns."""
    starting_cpu_s: float = 0.0
    """Of the device's core, in that time, for engines that were started."""
    lent_s: float = 0.0
    cpu: Spent = field(default_factory=Spent)
    out: Path = Path()

    @property
    def episodes_per_s(self) -> float:
        """Over whole steps."""
        spent = sum(row["step_s"] for row in self.steps)
        return sum(row["episodes"] for row in self.steps) / spent if spent else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Made while sampling."""
        spent = sum(row["sample_s"] for row in self.steps)
        return sum(row["tokens"] for row in self.steps) / spent if spent else 0.0


@dataclass(frozen=True)
class Place:
    """What is trained and served here."""

    out: Path
    model: str
    serving: str
    vocabulary: tuple[int, int]
    """Token ids that the serving model has."""
    context: int = 512
    max_seqs: int = 32
    kv_gb: float = 0.25


class Arena:
    def __init__(self, place: Place, cluster: up.Cluster, node: ColdNode, say: Say) -> None:
        self.place = place
        self.cluster = cluster
        self.node = node
        self.slo = LOOSE
        self._say = say
        self._dedicated = Page.open(cluster.nodes[0].page_path)

    async def serve(self, traffic: Traffic, seconds: float, seed: int) -> list[Sample]:
        """Serving alone, nobody trains."""
        stop, samples = asyncio.Event(), list[Sample]()
        serving = asyncio.create_task(self._serve(traffic, seed, samples, stop))
        await asyncio.sleep(seconds)
        stop.set()
        await serving
        return samples

    def promise(self, samples: list[Sample]) -> Slo:
        """`SLO_FACTOR` x the P99 of what was measured, from now on."""
        ttft = percentiles(s.ttft_s for s in samples)
        tpot = percentiles(s.tpot_s for s in samples)
        if ttft is None or tpot is None:
            raise ConfigError("the serving engine answered no request; see its log")
        self.slo = Slo(SLO_FACTOR * ttft.p99, SLO_FACTOR * tpot.p99)
        self.node.promise(self.slo)
        return self.slo

    def serving_seconds(self) -> float:
        """CPU time of the serving engine's arithmetic so far."""
        reading = self.node.page.serving()
        return (reading and thread_seconds(reading.writer.pid)) or 0.0

    async def run(
        self,
        mode: Mode,
        training: dict[str, Any],
        traffic: Traffic,
        seed: int,
        watch: Callable[[Run], None] = lambda _: None,
    ) -> Run:
        """A whole training run; `watch` is shown the run, and may read it while it grows."""
        run = Run(mode.name, seed=seed, out=self.place.out / f"{mode.name}-{time.time_ns()}")
        watch(run)
        await self._lend(mode)
        started_s = self.node.starts_cpu_s
        began, stop, samples = time.time(), asyncio.Event(), list[Sample]()
        serving = asyncio.create_task(self._serve(traffic, seed, samples, stop))
        try:
            await self._train(run, training, mode)
        finally:
            stop.set()
            await serving
            await self._take_back()
        if not run.steps:
            raise ConfigError(f"the trainer made no step: see {run.out / 'trainer.log'}")
        first, last = run.steps[0], run.steps[-1]
        run.window = start, end = (first["at"] - first["step_s"] - began, last["at"] - began)
        run.samples = [s for s in samples if start <= s.scheduled_s and s.finish_s <= end]
        run.starting_cpu_s = self.node.starts_cpu_s - started_s
        run.lengths = report.read(run.out / LENGTHS)
        for path in run.out.glob("evaluation-*.json"):
            run.evaluation[path.stem.partition("-")[2]] = json.loads(path.read_text())["reward"]
        return run

    async def _serve(
        self, traffic: Traffic, seed: int, samples: list[Sample], stop: asyncio.Event
    ) -> None:
        assert self.node.serving is not None
        prompts = load.Prompts(seed=seed, vocab=self.place.vocabulary)
        async with load.open_session() as session:
            target = await load.connect(session, self.node.serving.url, prompts=prompts)
            requests = traffic.requests(LONGEST_S, seed)
            await load.run(
                session, target, requests, slo=self.slo, prompts=prompts,
                on_sample=samples.append, stop=stop,
            )  # fmt: skip

    async def _lend(self, mode: Mode) -> None:
        node = self.node
        node.rule, node.preemptible = mode.rule, mode.preemption
        if mode.cold:
            await node.give_back()
        else:
            await node.warm_up()
        node.offered = mode.lent and not mode.cold

    async def _take_back(self) -> None:
        self.node.offered = False
        await self.node.revoke()

    async def _train(self, run: Run, training: dict[str, Any], mode: Mode) -> None:
        run.out.mkdir(parents=True)
        config = self._run_file(run, training)
        with (run.out / "trainer.log").open("wb") as log:
            trainer = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rose.cli", "train", str(config),
                stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        try:
            counting = Counting(run.cpu, self.node.page, self._dedicated, trainer.pid)
            while trainer.returncode is None:
                run.steps = report.read(run.out / METRICS)
                counting.look()
                await self._look(run, mode)
                await _wait(trainer, LOOK_S)
        finally:
            if trainer.returncode is None:
                trainer.send_signal(signal.SIGTERM)
                await trainer.wait()
        run.steps = report.read(run.out / METRICS)
        if trainer.returncode:
            said = (run.out / "trainer.log").read_text(errors="replace").strip().splitlines()
            raise ConfigError(f"the trainer ended with {trainer.returncode}: {said[-1:]}")

    def _run_file(self, run: Run, training: dict[str, Any]) -> Path:
        """JSON is TOML where values are plain; tables are written out."""
        top = {
            "name": NAME,
            "model": self.place.model,
            "out": str(run.out),
            "scheduler": self.cluster.scheduler_url,
            "store": self.cluster.store_url,
            "weights": self.cluster.weights_url,
            "wire": "float32",
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
        for name, table in training.items():
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
        path = run.out / "run.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    async def _look(self, run: Run, mode: Mode) -> None:
        """How long the device is asked for, and how long it is lent."""
        if not mode.lent:
            return
        try:
            url = f"{self.cluster.scheduler_url}/rose/v1/status"
            async with self.node.session.get(url) as answer:
                status = await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return
        mine = (one["lease"] for one in status["engines"] if one["id"] == self.node.url)
        lease = next(mine, "none")
        run.activating_s += LOOK_S * (lease == "activating")
        run.lent_s += LOOK_S * (lease == "active")
        if mode.cold:
            turns = sum(job["waiting"] + job["running"] for job in status["jobs"].values())
            if turns:
                self.node.offered = True
            elif self.node.offered:
                self.node.offered = False
                await self.node.give_back()


async def _wait(process: asyncio.subprocess.Process, seconds: float) -> None:
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        return


@asynccontextmanager
async def open_arena(place: Place, say: Say) -> AsyncIterator[Arena]:
    """Everything up, nothing lent yet, and all gone afterwards."""
    dedicated = {
        "device": "cpu:1",
        "kv_gb": place.kv_gb,
        "rollout": _engine(place, place.model) | CHUNKS,
    }
    whole = {
        "folder": str(place.out / "cluster"),
        "scheduler": {},
        "weights": {},
        "relay": {},
        "node": [dedicated],
    }
    config = cluster_config.parse(whole, "rose")
    async with up.running(config, say) as cluster:
        serving = {
            "device": "cpu:0",
            "kv_gb": place.kv_gb,
            "port": 0,
            "log_dir": str(place.out / "cluster" / "logs" / "node-cpu0"),
            "scheduler": cluster.scheduler_url,
            "serving": _engine(place, place.serving)
            | {"ttft_ms": LOOSE.ttft_s * 1e3, "tpot_ms": LOOSE.tpot_s * 1e3},
            "rollout": _engine(place, place.model) | CHUNKS,
        }
        say("starting the serving device")
        async with api.running(parse(serving, "rose"), ColdNode) as node:
            assert isinstance(node, ColdNode)
            node.offered = False
            for engine in (node.serving, node.rollout):
                assert engine is not None
                engine.keep_to(CORES)
            yield Arena(place, cluster, node, say)


def _engine(place: Place, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "max_model_len": place.context,
        "max_seqs": place.max_seqs,
    }
