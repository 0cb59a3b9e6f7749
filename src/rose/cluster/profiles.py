"""Latency profiles on disk, one per model, dtype and device; measured when missing."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from rose import models
from rose.cluster.config import ConfigError, EngineConfig, NodeConfig
from rose.executor.latency import Profile

log = logging.getLogger("rose.node")


@dataclass(frozen=True)
class Saved:
    path: Path
    profile: Profile


def path_for(model: str, dtype: str, device: str) -> Path:
    folder = models.resolve(model)
    config = (folder / "config.json").read_bytes()
    key = hashlib.sha256(config + dtype.encode()).hexdigest()[:12]
    home = models.default_cache().parent
    return home / "profiles" / f"{folder.name}-{key}-{device.replace(':', '')}.json"


async def ensure(config: NodeConfig) -> dict[str, Saved]:
    """The profiles of both engines; `rose profile` runs for those that are missing."""
    engines: dict[str, EngineConfig] = {"rollout": config.rollout}
    if config.serving is not None:
        engines["serving"] = config.serving
    saved = {}
    for role, engine in engines.items():
        path = path_for(engine.model, engine.dtype, config.device)
        if not path.exists():
            log.info(
                "no latency profile yet: measuring",
                extra={"facts": {"role": role, "model": engine.model, "profile": str(path)}},
            )
            await _measure(engine, config.device)
        try:
            saved[role] = Saved(path, Profile.load(path))
        except ValueError as error:
            raise ConfigError(f"{error}; delete it and `rose profile` again") from error
    return saved


async def _measure(engine: EngineConfig, device: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rose.cli", "profile", "--model", engine.model),
        *("--device", device, "--dtype", engine.dtype, "--max-batch", str(engine.max_seqs)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"profiling {engine.model} on {device} failed: {' '.join(last)}")
