"""One cache per cluster: every byte of a step crosses the WAN once, whoever asks behind it.

A step is fetched bucket by bucket into a `FileStore`, where it becomes visible when all of it is
there and its checksums hold. Subscribers need not wait for that: what has arrived of a bucket is
served while the rest is still coming, and they verify every frame themselves. A relay that was
killed goes on from the bytes on its disk. When the disk allowance is used up the oldest versions
go; the newest stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import xxhash

from rose.transfer.ahead import in_order
from rose.transfer.manifest import Bucket, Manifest, Step
from rose.transfer.route import route
from rose.transfer.store.base import NEWS_S, Store, StoreError, has_news
from rose.transfer.store.files import FileStore

log = logging.getLogger("rose.transfer")

PIECE = 1 << 20
"""Bytes fetched at a time: what a subscriber waits for at least."""
AHEAD = 4
"""Pieces on their way at once: on a long link answers take longer than their bytes."""
FRESH_S = 0.02
"""The list of steps is asked for no more often than this."""
ANSWER_S = 2.0
"""Longest wait for upstream's list; a subscriber must not believe that the relay is gone."""
WAIT_S = 60.0
"""Longest wait of a subscriber for bytes that are still coming."""


class _Arriving:
    """A step on its way: how much of each bucket is on disk."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests
        self.changed = threading.Condition()
        self.have: dict[tuple[int, int], int] = {}
        self.failed = ""

    def arrived(self, bucket: tuple[int, int], bytes_: int) -> None:
        with self.changed:
            self.have[bucket] = bytes_
            self.changed.notify_all()

    def fail(self, why: str) -> None:
        with self.changed:
            self.failed = why
            self.changed.notify_all()

    def wait(self, bucket: tuple[int, int], bytes_: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.failed or self.have.get(bucket, 0) >= bytes_, WAIT_S)
            if self.have.get(bucket, 0) < bytes_:
                raise StoreError(self.failed or "the rest of this version does not arrive")


class Relay:
    """A store that fetches what it has not from `upstream`; may be served by `server.Server`."""

    def __init__(
        self,
        upstream: Store,
        folder: Path,
        *,
        most_bytes: int | None = None,
        follows: bool = True,
    ) -> None:
        """`follows`: what is newest is fetched before anybody asks for it."""
        self.job = upstream.job
        self._upstream = upstream
        self._local = FileStore(folder, upstream.job)
        self._most_bytes = most_bytes
        self._follows = follows
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._arriving: dict[Step, _Arriving] = {}
        self._beginning = threading.Lock()
        """Held while a step's manifests are asked for: once, whoever wants them."""
        self._known: dict[Step, int] = {}
        self._known_at = 0.0
        self._asking: set[bool] = set()
        """Upstream is being asked: for what there is, for what is not there yet (True)."""

    # ---- what subscribers ask

    def steps(self, after: int | None = None) -> dict[Step, int]:
        """Upstream's; without it, those that are here whole."""
        began, known = time.monotonic(), None
        with self._news:
            if after is None:
                answered = partial(self._is_fresh, began - FRESH_S)
                if answered() or self._ask(None, answered, ANSWER_S):
                    known = self._known
            else:
                news = partial(self._has_news, after)
                if not news():
                    self._ask(after, news, NEWS_S)
                known = self._known
        return dict(known or self._local.steps())

    def _is_fresh(self, since: float) -> bool:
        return self._known_at > since

    def _has_news(self, after: int) -> bool:
        return has_news(self._known, after)

    def _ask(self, after: int | None, enough: Callable[[], bool], wait_s: float) -> bool:
        """Wait for upstream's answer to one question, however many wait here for it."""
        awaits = after is not None
        if awaits not in self._asking:
            self._asking.add(awaits)
            threading.Thread(
                target=self._hear, args=(after,), name="rose-relay", daemon=True
            ).start()
        return self._news.wait_for(enough, wait_s)

    def _hear(self, after: int | None) -> None:
        known: dict[Step, int] = {}
        try:
            known = self._upstream.steps(after)
        except StoreError as error:
            log.warning("the relay works from its disk: %s", error)
        finally:
            with self._news:
                self._known, self._known_at = known, time.monotonic()
                self._asking.discard(after is not None)
                self._news.notify_all()
        if self._follows:
            self._bring_newest(known)

    def manifests(self, step: Step) -> list[Manifest]:
        try:
            return self._local.manifests(step)
        except StoreError:
            return self._fetch(step).manifests

    def file(self, step: Step, rank: int, bucket: int, end: int) -> Path:
        if step in self._local.steps():
            return self._local.file(step, rank, bucket, end)
        arriving = self._fetch(step)
        known = arriving.manifests[rank].buckets if rank < len(arriving.manifests) else []
        if not 0 <= bucket < len(known) or not 0 <= end <= known[bucket].size:
            raise StoreError(f"version {step.version} has no byte {end} of bucket {rank}/{bucket}")
        arriving.wait((rank, bucket), end)
        return self._local.draft(step, rank, bucket)

    def read(self, step: Step, rank: int, bucket: int, offset: int, length: int) -> bytes:
        with self.file(step, rank, bucket, offset + length).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def write(self, step: Step, rank: int, bucket: int, data: bytes) -> None:
        raise StoreError("a relay only passes on")

    def seal(self, manifest: Manifest) -> None:
        raise StoreError("a relay only passes on")

    def remove(self, step: Step) -> None:
        raise StoreError("a relay only passes on")

    def close(self) -> None:
        self._upstream.close()

    # ---- what it does by itself

    def _bring_newest(self, known: dict[Step, int]) -> None:
        """Fetch what leads to the newest version, before anybody asks."""
        here = self._local.steps()
        newest = max((step.version for step in here), default=None)
        try:
            for step in route(known, newest):
                if step not in here:
                    self._fetch(step)
        except StoreError as error:
            log.warning("the newest version is not here yet: %s", error)

    def _fetch(self, step: Step) -> _Arriving:
        """Whoever asks first starts it; the others join."""
        with self._beginning:
            with self._lock:
                arriving = self._arriving.get(step)
            if arriving is None or arriving.failed:
                arriving = self._arriving[step] = _Arriving(self._upstream.manifests(step))
                threading.Thread(
                    target=self._bring, args=(step, arriving), name="rose-relay", daemon=True
                ).start()
            return arriving

    def _bring(self, step: Step, arriving: _Arriving) -> None:
        try:
            for manifest in arriving.manifests:
                for number, bucket in enumerate(manifest.buckets):
                    self._bring_bucket(manifest, number, bucket, arriving)
            for manifest in arriving.manifests:
                self._local.seal(manifest)
            self._make_room()
        except (StoreError, OSError) as error:
            log.error("version %d did not arrive: %s", step.version, error)
            arriving.fail(f"version {step.version} did not arrive: {error}")
            return
        with self._lock:
            del self._arriving[step]

    def _bring_bucket(
        self, manifest: Manifest, number: int, bucket: Bucket, arriving: _Arriving
    ) -> None:
        step, rank = manifest.step, manifest.rank
        path = self._local.draft(step, rank, number)
        have = path.stat().st_size if path.exists() else 0
        if have > bucket.size:
            path.unlink()
            have = 0
        pieces = (
            partial(self._upstream.read, step, rank, number, at, min(PIECE, bucket.size - at))
            for at in range(have, bucket.size, PIECE)
        )
        with path.open("ab") as file:
            for data in in_order(pieces, AHEAD, AHEAD, "rose-relay"):
                file.write(data)
                file.flush()
                have += len(data)
                if have < bucket.size:  # the last piece may be passed on when all is verified
                    arriving.arrived((rank, number), have)
        if _digest(path) != bucket.digest:
            path.unlink()
            raise StoreError(f"bucket {rank}/{number} has a wrong checksum")
        arriving.arrived((rank, number), bucket.size)

    def _make_room(self) -> None:
        """Remove the oldest steps while there is too much; never the newest version."""
        if self._most_bytes is None:
            return
        with self._lock:
            steps = self._local.steps()
            total = sum(steps.values())
            for step, size in list(steps.items())[:-1]:
                if total <= self._most_bytes:
                    return
                self._local.remove(step)
                total -= size


def _digest(path: Path) -> bytes:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            state.update(piece)
    return state.digest()
