"""What a node remembers on disk, so that one that is started again finds its engines, and does not
offer a device that its owner has taken back.

The memo lies beside the page and goes with it. That a device was taken back has a file of its own
in the log folder, which also outlives a clean stop and a reboot. It is there from the start under
another name, because a file can be renamed on a full disk. Nothing waits for memo or file: an order
stands on the page first, and what could not be written is tried again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from rose.cluster.config import ConfigError, NodeConfig
from rose.cluster.engine import Engine

log = logging.getLogger("rose.node")

SAYS = """The name of this file says whether the owner of the device has taken it back.
A device that was taken back is not lent until POST /activate.
"""


class Memo:
    def __init__(
        self, path: Path, taken_back: Path, again: Callable[[str, Any], Engine] | None = None
    ) -> None:
        """`again` makes an engine of what is known of it."""
        self.path = path
        self._taken_back = taken_back
        self._not_taken_back = taken_back.with_name(f"not-{taken_back.name}")
        self._again = again or _engine
        self.taken_back = False
        """As the node before this one left it."""
        self.unwritten = False
        """The latest could not be written yet."""

    @classmethod
    def of(cls, node: NodeConfig) -> Memo:
        device = node.device.replace(":", "")
        return cls(node.page_path.with_suffix(".json"), node.log_dir / f"taken-back-{device}")

    def remember(self, engines: Iterable[Engine | None], *, offered: bool) -> None:
        """As well as the disk allows; `unwritten` says that it has to be tried again."""
        known = {
            e.role: {"url": e.url, "pid": e.pid, "started": e.started, "log": str(e.log)}
            for e in engines
            if e is not None and e.pid
        }
        content = json.dumps({"node": os.getpid(), "engines": known, "offered": offered})
        fresh = self.path.with_suffix(f".{os.getpid()}")
        was_unwritten, self.unwritten = self.unwritten, False
        try:
            fresh.write_text(content)
            fresh.chmod(0o600)
            fresh.replace(self.path)
        except OSError as error:
            self._failed(was_unwritten, self.path, error)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
        self._mark(was_unwritten, offered=offered)

    def _mark(self, was_unwritten: bool, *, offered: bool) -> None:
        now, before = self._taken_back, self._not_taken_back
        if offered:
            now, before = before, now
        try:
            if before.exists():
                before.replace(now)
            elif not now.exists():
                now.parent.mkdir(parents=True, exist_ok=True)
                now.write_text(SAYS)
        except OSError as error:
            self._failed(was_unwritten, now, error)

    def _failed(self, before: bool, path: Path, error: OSError) -> None:
        if not before:
            log.error("cannot write %s: %s; going on, and trying again", path, error.strerror)
        self.unwritten = True

    def recall(self, device: str) -> dict[str, Engine]:
        """Engines that an earlier node of this device left running."""
        self.taken_back = self._taken_back.exists()
        try:
            memo = json.loads(self.path.read_text())
            node, engines = int(memo["node"]), dict(memo["engines"])
            self.taken_back |= not memo.get("offered", True)
        except (OSError, ValueError, TypeError, LookupError):
            return {}
        if node != os.getpid() and _is_node(node):
            raise ConfigError(f"device {device} already has a node, pid {node}")
        found = {}
        for role, known in engines.items():
            engine = self._again(role, known)
            if engine.started == known["started"] and engine.alive:
                log.info("found engine again", extra={"facts": {"role": role, "pid": engine.pid}})
                found[role] = engine
        return found

    def forget(self) -> None:
        """The engines are gone; that the device was taken back is not forgotten."""
        self.path.unlink(missing_ok=True)
        self._not_taken_back.unlink(missing_ok=True)


def _engine(role: str, known: Any) -> Engine:
    return Engine(role, known["url"], known["pid"], Path(known["log"]))


def _is_node(pid: int) -> bool:
    try:
        return any("rose" in word for word in psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False
