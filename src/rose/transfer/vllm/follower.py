"""Keeps a worker's host copy fresh and the newest version staged, in a thread beside generation.

A version goes into the model in two steps, so that the ranks of an engine change together or not at
all: `arm` waits until it is staged and holds it, `commit` writes it. What was staged before a
commit is compared with the model of before, and is staged again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from rose.transfer.copy import Copy
from rose.transfer.delta import Changes, FrameError
from rose.transfer.errors import TransferError
from rose.transfer.layout import Piece
from rose.transfer.store.base import StoreError
from rose.transfer.subscriber import Subscriber, Taken
from rose.transfer.vllm.staging import Frames, Staged

log = logging.getLogger("vllm.rose")

LOOK_S = 1.0
"""How often a store is looked at when nobody says that there is something new."""
AGAIN_S = 0.02
"""The same while somebody waits for a version that the host's copy has."""
AHEAD_S = 0.5
"""How long a version that somebody waits for goes ahead of the host's copy: patching would slow its
commit."""
NICE = 10
"""Generation comes first."""


class Model(Protocol):
    """As `staging.Live`."""

    def expect(self, copy: Copy, piece: Piece, index: int, changes: Changes) -> None: ...

    def stage(
        self, copy: Copy, version: int, taken: Frames | None, early: bool = False
    ) -> Staged | None: ...


Open = Callable[[], tuple[Subscriber, Model] | None]


class Follower:
    """`open_` makes the subscriber and finds the model; None as long as nothing is published."""

    def __init__(self, open_: Open, cores: Sequence[int] = ()) -> None:
        self._open = open_
        self._cores = cores
        self._changed = threading.Condition()
        self._wanted = -1
        self._staged: Staged | None = None
        self._armed: Staged | None = None
        self._commits = 0
        self.version: int | None = None
        """What the model is; None before the first commit."""
        self._error = ""
        self._soon = False
        """Something is being staged."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rose-weights", daemon=True)
        self._thread.start()

    def status(self, wanted: int | None = None) -> dict[str, Any]:
        """Also a hint that a version should be there."""
        with self._changed:
            if wanted is not None and wanted > self._wanted:
                self._wanted = wanted
                self._changed.notify_all()
            staged = self._staged.version if self._staged else None
            return {
                "version": self.version,
                "staged": staged,
                "soon": self._soon,
                "error": self._error,
            }

    def arm(self, version: int, wait_s: float) -> None:
        """Hold a version for `commit`; raises unless it is staged, or the model's, in that time."""
        self.status(version)
        with self._changed:
            self._changed.wait_for(lambda: self._ready(version), wait_s)
            if self.version == version and self._staged is None:
                self._armed = Staged(version)
            elif self._staged is not None and self._staged.version == version:
                self._armed = self._staged
            else:
                newer = self._staged.version if self._staged else None
                because = self._error or (f"{newer} is staged" if newer else "it did not come")
                raise TransferError(f"version {version} cannot be committed: {because}")

    def disarm(self) -> None:
        with self._changed:
            self._armed = None

    def commit(self) -> None:
        """Write what is armed. If that fails the model is none of the versions until the next."""
        with self._changed:
            if self._armed is None:
                raise TransferError("no version is armed")
            armed, self._armed, self._staged = self._armed, None, None
            self._commits += 1
            self.version = None
            armed.apply()
            self.version = armed.version
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout=60.0)

    # ---- the thread

    def _run(self) -> None:
        self._step_back()
        opened = None
        while not self._stopping:
            try:
                opened = opened or self._open()
                if opened is not None:
                    self._follow(*opened)
                self._error = ""
            except (TransferError, StoreError, OSError) as error:
                if str(error) != self._error:
                    log.error("weights: %s", error)
                self._error = str(error)
            except Exception as error:  # a dead thread would look like a store without news
                log.exception("weights: a defect in staging")
                self._error = repr(error)
            self._rest(None if opened is None or self._error else opened[0])

    def _rest(self, subscriber: Subscriber | None) -> None:
        """Until there may be something to do."""
        with self._changed:
            wanted, staged = self._wanted, self._staged.version if self._staged else -1
            if subscriber is None or wanted <= max(self.version or -1, staged):
                self._changed.wait(LOOK_S)
                return
            if subscriber.version is not None and subscriber.version >= wanted:
                self._changed.wait(AGAIN_S)
                return
        with suppress(StoreError):  # the next look says so
            subscriber.await_news()

    def _follow(self, subscriber: Subscriber, model: Model) -> None:
        try:
            subscriber.update(_Ahead(self, model))
        finally:  # also without the store: an engine that restarts has the host's copy
            if subscriber.version is not None:
                self._stage(subscriber, model)

    def stage_early(self, model: Model, taken: Taken, copy: Copy) -> None:
        assert taken.version is not None
        with suppress(TransferError):  # it comes again, and is told, when the copy has it
            self._hold(model, copy, taken.version, taken.frames, early=True)
        with self._changed:
            if self._staged is not None and self._wanted >= taken.version:
                self._changed.wait_for(lambda: self._staged is None or self._stopping, AHEAD_S)

    def _stage(self, subscriber: Subscriber, live: Model) -> None:
        with subscriber.reading() as copy:
            version, taken, model = subscriber.version, subscriber.taken, self.version
            if version is not None:
                known = model is not None and (taken.base, taken.version) == (model, version)
                self._hold(live, copy, version, taken.frames if known else None)

    def _hold(
        self, model: Model, copy: Copy, version: int, frames: Frames | None, *, early: bool = False
    ) -> None:
        with self._changed:
            commits = self._commits
            if version == (self._staged.version if self._staged else self.version):
                return
        self._soon = True
        try:
            staged = model.stage(copy, version, frames, early)
        finally:
            self._soon = False
        with self._changed:
            if staged is not None and commits == self._commits:
                self._staged, self._error = staged, ""
                self._changed.notify_all()

    def _ready(self, version: int) -> bool:
        staged = self._staged
        return (staged is not None and staged.version >= version) or self.version == version

    def _step_back(self) -> None:
        """Off the device's cores, behind generation: threads inherit both from who made them."""
        import torch

        torch.set_num_threads(1)
        with suppress(OSError):
            if self._cores:
                os.sched_setaffinity(0, self._cores)
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class _Ahead:
    """What changes the model can be staged before the copy has it, unless it has to be compared
    with the copy; and be prepared before all of it is here."""

    def __init__(self, follower: Follower, model: Model) -> None:
        self._follower = follower
        self._model = model

    def frame(self, base: int, copy: Copy, piece: Piece, index: int, changes: Changes) -> None:
        if base == self._follower.version:
            with suppress(TransferError, FrameError):  # as below
                self._model.expect(copy, piece, index, changes)

    def whole(self, taken: Taken, copy: Copy) -> None:
        if taken.base is not None and taken.base == self._follower.version:
            self._follower.stage_early(self._model, taken, copy)
