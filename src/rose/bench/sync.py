"""From a trainer's `publish` to an engine that generates with the new version.

    trainer and its server, held back to the link's speed -- relay -- engine (vLLM, a real node)

Three processes, real sockets. A version of which a given share changed, and one of which everything
did (what sending dense weights costs, through the same code, uncompressed), take turns on every
link. Then the same for versions that a real RL loop makes, and while the engine is busy generating.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file

from rose import models
from rose.bench import rl_updates, rollouts
from rose.bench.arrivals import Fixed
from rose.cluster.node import Node
from rose.transfer.manifest import digest
from rose.transfer.publisher import Publisher
from rose.transfer.store import open_store
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Pace, Server
from rose.transfer.store.tcp import TcpStore
from rose.transfer.subscriber import Subscriber
from rose.transfer.vllm.client import EngineClient, Updated

Say = Callable[[str], None]
JOB = "bench"
UNLIMITED = 1e12
SQUEEZED = 0.5
"""On faster links (Gb/s) compressing takes one core longer than the bytes that it saves."""
SLOW = 0.1e9 / 8
"""Bytes a second at which a dense version takes longer than a window to come."""
WAIT_S = 300.0
HOSTS = 8
"""Subscribers behind one relay, to count copies over the WAN."""
BUSY_S = 10.0
"""Generation is counted this long, with and without updates coming in."""


@dataclass(frozen=True)
class Sync:
    """One version on its way."""

    total_s: float
    publish_s: float
    stored: int
    changed: int
    updated: Updated


class Site:
    """Trainer, shaped link, relay, and an engine behind it."""

    def __init__(self, folder: Path, model: str, engine: EngineClient) -> None:
        self.folder = folder
        self.engine = engine
        self.values = {
            name: value.bfloat16()
            for file in sorted(models.resolve(model).glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        self.files = FileStore(folder / "trainer", JOB)
        self.publisher = Publisher(self.files, threads=1)  # the others have work too
        self.pace = Pace(UNLIMITED)
        self.far = Server(lambda job: self.files, pace=self.pace)
        self.relay, self.near = _start_relay(self.far, folder)
        self._random = torch.Generator().manual_seed(0)

    def close(self) -> None:
        self.relay.terminate()
        self.relay.wait()
        self.far.close()

    def change(self, share: float) -> None:
        """So many elements, anywhere, by one bf16 step."""
        for value in self.values.values():
            bits = value.view(torch.int16)
            if share < 1:
                bits ^= (torch.rand(bits.shape, generator=self._random) < share).short()
            else:
                bits ^= 1

    async def sync(self, weights: Any) -> Sync:
        """Publish, and bring the engine there."""
        began = time.monotonic()
        report = await asyncio.to_thread(self.publisher.publish, weights)
        publish_s = time.monotonic() - began
        updated = await self.engine.update(report.step.version, WAIT_S)
        total_s = time.monotonic() - began
        await asyncio.to_thread(self.publisher.settle)  # training would take longer
        return Sync(total_s, publish_s, report.stored, report.changed, updated)

    async def exact(self) -> bool:
        """Whether every slice in the engine's process has the trainer's bits."""
        await self.engine.pause()
        try:
            ranks = await self.engine.digests()
        finally:
            await self.engine.resume()
        slices = [one for rank in ranks for one in rank]
        return bool(slices) and all(
            digest(self.values[name][tuple(slice(*ends) for ends in box)].view(torch.int16)
                   .contiguous().numpy()).hex() == found
            for name, box, found in slices
        )  # fmt: skip


def _start_relay(far: Server, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`rose relay`, and where it serves."""
    upstream = f"tcp://{far.address[0]}:{far.address[1]}"
    words = [*("relay", upstream, "--job", JOB, "--folder", str(folder / "relay"))]
    relay = subprocess.Popen(
        [sys.executable, "-m", "rose.cli", *words, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert relay.stdout is not None
    said = relay.stdout.readline()
    if not said.startswith("serving "):
        relay.kill()
        raise RuntimeError("the relay did not start")
    return relay, said.split()[-1]


@asynccontextmanager
async def site(node: Node, model: str) -> AsyncIterator[Site]:
    assert node.rollout is not None
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    # The engine still follows, into a folder that is being removed, until its node stops.
    with TemporaryDirectory(prefix="rose-bench-", ignore_cleanup_errors=True) as folder:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            made = Site(Path(folder), model, EngineClient(session, node.rollout.url))
            try:
                await asyncio.to_thread(made.publisher.publish, made.values, 0)
                await made.engine.init(made.near, JOB, str(made.folder / "copy"))
                await made.engine.update(0, WAIT_S)
                yield made
            finally:
                made.close()


async def links(
    here: Site, gbps: tuple[float, ...], share: float, repeats: int, say: Say
) -> dict[str, Any]:
    """Sparse and dense by turns, at every speed."""
    found: dict[str, Any] = {}
    for speed in gbps:
        here.pace.bytes_per_s = speed * 1e9 / 8
        runs: dict[str, list[Sync]] = {"rose": [], "dense": []}
        for _ in range(repeats):
            for kind, changed in (("rose", share), ("dense", 1.0)):
                await asyncio.to_thread(here.change, changed)
                here.publisher.compress = kind == "rose" and speed < SQUEEZED
                runs[kind].append(await here.sync(here.values))
        rows = {kind: _row(syncs) for kind, syncs in runs.items()}
        speedup = rows["dense"]["total_s"] / rows["rose"]["total_s"]
        found[f"{speed:g}"] = {**rows, "sync_speedup_vs_dense": speedup}
        say(
            f"{speed:g} Gb/s, {share:.1%} changed: {rows['rose']['total_s']:.3f} s, dense "
            f"{rows['dense']['total_s']:.2f} s, {speedup:.1f} times as long; "
            f"pause {rows['rose']['pause_ms']:.0f} ms"
        )
    here.pace.bytes_per_s = UNLIMITED
    here.publisher.compress = True
    return found


async def real(here: Site, model: str, steps: int, say: Say) -> dict[str, Any]:
    """Versions of a real RL loop; its first one, as loaded, is not counted."""
    syncs: list[Sync] = []
    loop = rl_updates.updates(models.resolve(model), steps, 1, say)
    while (update := await asyncio.to_thread(next, loop, None)) is not None:
        done = await here.sync(update.module)
        if update.step:
            syncs.append(done)
            density = done.changed / sum(v.numel() for v in here.values.values())
            say(f"  {density:.3%} sent, pause {done.updated.pause_s * 1e3:.0f} ms")
    return _row(syncs)


async def wan_copies(here: Site, share: float) -> float:
    """Bytes that left the trainer's server per byte of the version, with many hosts behind."""
    stores = [open_store(here.near, JOB) for _ in range(HOSTS)]
    hosts = [Subscriber(s, here.folder / f"host-{i}") for i, s in enumerate(stores)]
    for host in hosts:
        await asyncio.to_thread(host.update)
    here.change(share)
    sent = here.far.sent
    report = await asyncio.to_thread(here.publisher.publish, here.values)
    threads = [threading.Thread(target=host.update) for host in hosts]
    for thread in threads:
        thread.start()
    await here.engine.update(report.step.version, WAIT_S)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    for store in stores:
        assert isinstance(store, TcpStore)
        store.close()
    return (here.far.sent - sent) / report.stored


async def throughput(here: Site, url: str, share: float, repeats: int, say: Say) -> dict[str, Any]:
    """Tokens a second of a busy engine: undisturbed, while a version is on its way to it all the
    time (a dense one on the slow link), and with a version brought in once per window."""
    plan = rollouts.RolloutPlan(
        in_flight=4, turns=1, prompt_tokens=Fixed(16), turn_tokens=Fixed(64), vocab=(100, 20_000)
    )
    stop, produced = asyncio.Event(), 0

    def count(_: float, tokens: int) -> None:
        nonlocal produced
        produced += tokens

    async def window() -> float:
        began, before = time.monotonic(), produced
        await asyncio.sleep(BUSY_S)
        return (produced - before) / (time.monotonic() - began)

    rates: dict[str, list[float]] = {"alone": [], "fetching": [], "updated": []}
    going = asyncio.create_task(rollouts.drive(url, plan, stop, on_tokens=count))
    try:
        await asyncio.sleep(BUSY_S / 2)
        for _ in range(repeats):
            rates["alone"].append(await window())
            await asyncio.to_thread(here.change, 1.0)
            here.publisher.compress = False
            here.pace.bytes_per_s = SLOW
            slow = asyncio.create_task(here.sync(here.values))
            await asyncio.sleep(BUSY_S / 5)  # until it is published
            rates["fetching"].append(await window())
            here.publisher.compress = True
            here.pace.bytes_per_s = UNLIMITED
            await slow
            await asyncio.to_thread(here.change, share)
            one = asyncio.create_task(here.sync(here.values))
            rates["updated"].append(await window())
            await one
    finally:
        stop.set()
        await going
    rate = {kind: median(each) for kind, each in rates.items()}
    say(
        f"generation {rate['alone']:.1f} tokens/s, while fetching {rate['fetching']:.1f}, "
        f"with a version every {BUSY_S:g} s {rate['updated']:.1f}"
    )
    return {
        **rate,
        "all": rates,
        "fetching_vs_alone": rate["fetching"] / rate["alone"],
        "updated_vs_alone": rate["updated"] / rate["alone"],
    }


def _row(syncs: list[Sync]) -> dict[str, Any]:
    """Medians and the spread."""
    totals = [one.total_s for one in syncs]
    pauses = [one.updated.pause_s * 1e3 for one in syncs]
    return {
        "total_s": median(totals),
        "total_s_spread": [min(totals), max(totals)],
        "publish_s": median(one.publish_s for one in syncs),
        "staged_s": median(one.updated.staged_s for one in syncs),
        "stop_ms": median(one.updated.stop_s * 1e3 for one in syncs),
        "pause_ms": median(pauses),
        "pause_ms_worst": max(pauses),
        "stored_bytes": median(one.stored for one in syncs),
        "changed": median(one.changed for one in syncs),
        "versions": len(syncs),
    }
