"""A trainer's weights into all engines behind a front door, one whole version at a time.

`send` publishes what changed (`rose.transfer`), then leads the engines there by the door's control
routes: start, update, finish. What is begun ends: after a failure engines are told to give up, and
go on with the version they had. Any of it may have been done before, by a call whose answer was
lost or by a trainer that died: to begin again is always right.
"""

from __future__ import annotations

import logging
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import msgspec

from rose.net import bearer
from rose.transfer import Publisher
from rose.transfer.errors import TransferError
from rose.transfer.store import Store, open_store

if TYPE_CHECKING:
    import torch

    from rose.transfer.publisher import Report

log = logging.getLogger("rose.rl")

COPIES = Path(tempfile.gettempdir(), "rose-weights")
"""Where hosts keep their copies of weights, if nothing else is said."""
CALL_S = 330.0
"""The door itself waits 300 s for engines."""
STAGED_S = 2.0
"""How long an engine waits for a version within a call: it does nothing else meanwhile, while it
fetches and stages beside its work. Longer than most versions take; for others it is asked again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class _Away(TransferError):
    """There is no door, or no engine behind it: now."""


class WeightSync:
    """`store` is what the publisher writes to, `engines_from` where engines fetch (a store's server
    or a relay; the same if not said), `folder` where their hosts keep their copy. `patience_s`: for
    engines that are not there, or do not get the version. `secret`: the door's, if it has one."""

    def __init__(
        self,
        store: str,
        job: str = "default",
        *,
        folder: str | None = None,
        engines_from: str | None = None,
        wire: str = "bfloat16",
        patience_s: float = 300.0,
        secret: str = "",
    ) -> None:
        folder = folder or str(COPIES / job)
        self._source = {"store": engines_from or store, "job": job, "folder": folder}
        self._address, self._job, self._wire = store, job, wire
        self._patience_s = patience_s
        self._headers = {"Content-Type": "application/json"} | bearer(secret)
        self._door = ""
        self._introduced = False
        self._store: Store | None = None
        self._publisher: Publisher | None = None
        self.last: Report | None = None
        """Of the version that was published last: its bytes, what changed."""

    def open(self, door: str) -> None:
        """Tell engines, and those to come, where versions are; go on from what the store has."""
        self._door = door.rstrip("/")
        self._patiently(self._introduce, _Away)
        if self._publisher is None:
            self._store = open_store(self._address, self._job)
            self._publisher = Publisher(self._store, wire=self._wire)

    @property
    def newest(self) -> int | None:
        """Version in the store."""
        return self._publisher.version if self._publisher is not None else None

    def send(self, named: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> Report:
        """All weights become a new version, and the engines' own. Raises with what the door said
        if they do not get there; the version is published all the same."""
        if self._publisher is None:
            raise TransferError("weights cannot be sent: not opened, or closed")
        # Trainers gather or merge weights in place: each is what it is until the next is asked for.
        kept = ((name, value.detach().clone()) for name, value in named)
        self.last = report = self._publisher.publish(kept, version)
        self.lead(report.step.version)
        return report

    def lead(self, version: int) -> None:
        """All engines to a version that was published before."""
        self._patiently(partial(self._lead, version), TransferError)

    def close(self) -> None:
        """Engines keep what they have."""
        if self._publisher is not None and self._store is not None:
            self._publisher.settle()
            self._store.close()
        self._publisher = self._store = None

    def _introduce(self) -> None:
        config = self._ask("server_info?config_format=json")["vllm_config"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
        if backend != "rose":
            raise TransferError(
                f"engines behind {self._door} have the weight transfer backend {backend}: "
                """start them with --weight-transfer-config '{"backend": "rose"}'"""
            )
        if "float32" in config["model_config"]["dtype"] and self._wire != "float32":
            log.warning(
                "engines compute in float32 and get weights rounded to %s: with wire='float32' "
                "they are the trainer's, bit for bit",
                self._wire,
            )
        self._ask("init_weight_transfer_engine", {"init_info": self._source})
        self._introduced = True

    def _lead(self, version: int) -> None:
        if not self._introduced:
            self._introduce()
        try:
            self._update(version)
        except _Away:
            self._introduced = False  # a scheduler that was started again does not know the store
            raise

    def _update(self, version: int) -> None:
        try:
            self._ask("start_weight_update", {})
        except TransferError:
            self._give_up()
            self._ask("start_weight_update", {})
        try:
            told = {"version": version, "wait_s": STAGED_S}
            self._ask("update_weights", {"update_info": told})
            self._ask("finish_weight_update", {"weight_version": str(version)})
        except TransferError:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """End an update that has begun; engines that are in one answer that they gave it up, others
        that they are in none."""
        try:
            self._ask("update_weights", {"update_info": {"give_up": True}})
        except TransferError as error:
            log.debug("%s", error)

    def _patiently(self, act: Callable[[], None], again: type[TransferError]) -> None:
        deadline, pause = time.monotonic() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                return act()
            except again as error:
                if time.monotonic() + pause > deadline:
                    raise
                log.warning("%s; again in %.1f s", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _ask(self, route: str, body: Any = None) -> Any:
        """Not by TRL's session: that asks again after a 500 and then forgets what was said."""
        data = None if body is None else msgspec.json.encode(body)
        url = f"{self._door}/{route}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, self._headers), timeout=CALL_S
            ) as answer:
                return msgspec.json.decode(answer.read())
        except HTTPError as error:
            said = f"{url}: {error.code} {error.read()[:1000].decode(errors='replace')}"
            raise (_Away if error.code == 503 else TransferError)(said) from error
        except (OSError, HTTPException) as error:
            raise _Away(f"{url}: {error}") from error
