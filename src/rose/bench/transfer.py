"""`rose bench transfer`: codecs, real RL updates, versions on their way into an engine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from rose.bench import codecs, rl_updates, sync
from rose.bench.executor import machine
from rose.cluster import api
from rose.cluster.config import NodeConfig, parse
from rose.executor import priority

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]
SHARE = 0.01
"""Of the elements, in versions that are made up."""


@dataclass(frozen=True)
class Settings:
    model: str = "smollm2"
    device: str = "cpu:0"
    gbps: tuple[float, ...] = (0.2, 1.0, 10.0)
    repeats: int = 3
    rl_steps: int = 10
    quick: bool = False
    out: Path = Path("bench-out")

    @property
    def rounds(self) -> int:
        return 1 if self.quick else self.repeats


def main(settings: Settings, say: Say, keep: Keep) -> None:
    """`keep` gets the result so far after every part."""
    found: dict[str, Any] = {}
    config = _node_config(settings)

    def note(name: str, part: Any) -> None:
        found[name] = part
        keep(_result(settings, found))

    densities = (SHARE,) if settings.quick else codecs.DENSITIES
    note("codecs", {f"{d:g}": codecs.measure(d, say=say) for d in densities})
    steps = 3 if settings.quick else settings.rl_steps
    note("updates", rl_updates.measure(steps, 0, say, settings.model))
    asyncio.run(_engine(settings, config, say, note))


def _node_config(settings: Settings) -> NodeConfig:
    wanted = {
        "device": settings.device,
        "kv_gb": 0.5,
        "page": Path(f"/dev/shm/rose-bench-transfer-{os.getpid()}"),
        "port": 0,
        "log_dir": settings.out / "logs",
        "rollout": {"model": settings.model, "max_model_len": 1024, "max_seqs": 16},
    }
    return parse(wanted, "rose bench")


async def _engine(
    settings: Settings, config: NodeConfig, say: Say, note: Callable[[str, Any], None]
) -> None:
    logging.getLogger("rose").setLevel(logging.WARNING)
    say(f"starting an engine with {settings.model} on {settings.device}")
    async with api.running(config) as node:
        await node.activate()
        assert node.rollout is not None
        async with sync.site(node, settings.model) as here:
            relay = here.relay.pid
            note("links", await sync.links(here, settings.gbps, SHARE, settings.rounds, say))
            note("bit_exact", await here.exact())
            note("wan_copies", await sync.wan_copies(here, SHARE))
            with on_cores(config.where.host_cores, relay):
                busy = await sync.throughput(here, node.rollout.url, SHARE, settings.rounds, say)
            note("throughput", busy)
            note("real", await sync.real(here, settings.model, 2 if settings.quick else 5, say))


@contextmanager
def on_cores(cores: Iterable[int], relay: int) -> Iterator[None]:
    """Keep this process, which is the trainer, and the relay from where the engine needs to be."""
    before = os.sched_getaffinity(0)
    _pin(cores, relay)
    try:
        yield
    finally:
        _pin(before, relay)


def _pin(cores: Iterable[int], relay: int) -> None:
    """All threads: servers have theirs already, and new ones come from those."""
    wanted = set(cores)
    for process in (psutil.Process(), psutil.Process(relay)):
        for thread in process.threads():
            with suppress(ProcessLookupError):  # it has ended since
                priority.pin([thread.id], wanted)


def _result(settings: Settings, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "bench": "transfer",
        "machine": machine(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()},
        "modes": dict(found),
        "ratios": _ratios(found),
    }


def _ratios(found: dict[str, Any]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    if one := found.get("codecs", {}).get(f"{SHARE:g}"):
        row = one["codecs"]["rose"]
        ratios["wire_percent_at_1pct"] = row["wire_percent"]
        ratios["encode_vs_memcpy"] = row["encode_vs_memcpy_codec"]
        ratios["apply_vs_memcpy"] = row["apply_vs_memcpy_codec"]
    if links := found.get("links"):
        for speed, row in links.items():
            name = "sync_speedup_vs_dense" + ("" if speed == "1" else f"_{speed}gbps")
            ratios[name] = row["sync_speedup_vs_dense"]
    if "bit_exact" in found:
        exact = found["bit_exact"] and all(
            row["bit_exact"] for part in found["codecs"].values() for row in part["codecs"].values()
        )
        ratios["bit_exact"] = float(
            exact and all(s["bit_exact"] for s in found["updates"]["steps"])
        )
    if "wan_copies" in found:
        ratios["wan_copies_per_cluster"] = found["wan_copies"]
    if "throughput" in found:
        ratios["throughput_while_fetching"] = found["throughput"]["fetching_vs_alone"]
        ratios["throughput_with_updates"] = found["throughput"]["updated_vs_alone"]
    if "real" in found:
        ratios["pause_ms"] = found["real"]["pause_ms"]
    return ratios
