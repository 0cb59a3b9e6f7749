"""What a node remembers on disk, so that one that is started again finds its engines, and does not
offer a device that its owner has taken back."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from rose.cluster.config import ConfigError
from rose.cluster.engine import Engine

log = logging.getLogger("rose.node")


class Memo:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.offered = True
        """As the node before this one left it."""

    def remember(self, engines: Iterable[Engine | None], *, offered: bool) -> None:
        known = {
            e.role: {"url": e.url, "pid": e.pid, "started": e.started, "log": str(e.log)}
            for e in engines
            if e is not None and e.pid
        }
        fresh = self.path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({"node": os.getpid(), "engines": known, "offered": offered}))
        fresh.chmod(0o600)
        fresh.replace(self.path)

    def recall(self, device: str) -> dict[str, Engine]:
        """Engines that an earlier node of this device left running."""
        try:
            memo = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if memo["node"] != os.getpid() and _is_node(memo["node"]):
            raise ConfigError(f"device {device} already has a node, pid {memo['node']}")
        self.offered = bool(memo.get("offered", True))
        found = {}
        for role, known in memo["engines"].items():
            engine = Engine(role, known["url"], known["pid"], Path(known["log"]))
            if engine.started == known["started"] and engine.alive:
                log.info("found engine again", extra={"facts": {"role": role, "pid": engine.pid}})
                found[role] = engine
        return found

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _is_node(pid: int) -> bool:
    try:
        return any("rose" in word for word in psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False
