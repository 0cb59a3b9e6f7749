"""The trainer's side: publish what changed since the version before, as steps of a job's history.

`publish` compares the weights with a snapshot of the last version, frame by frame in threads, and
hands buckets to the store while still comparing. It returns when the step is durable and visible.
Only then the snapshot follows, in a thread that stays behind everybody else's work, by reading the
step back: so it is what receivers get, and memory stays at one snapshot in the wire dtype and a few
buckets. If anything fails the snapshot stays, the step is not there, and the next attempt compares
with the same version again.

History is bounded. Every version is a delta; every `anchor_every` versions there is also an anchor
for who comes new, every `MERGE` versions one delta of the last few for who missed some; steps older
than the anchor before the last are removed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from rose.transfer import frame, lossy
from rose.transfer.ahead import in_order
from rose.transfer.delta import UNSIGNED, Bits, Changes, diff, merge, patch
from rose.transfer.errors import TransferError
from rose.transfer.fetch import fetch
from rose.transfer.layout import FRAME, Piece, size
from rose.transfer.manifest import (
    FRAMES,
    VERSIONS,
    WIDTHS,
    Bucket,
    Manifest,
    Part,
    Step,
    Tensor,
    digest,
)
from rose.transfer.route import route
from rose.transfer.store.base import Store, StoreError
from rose.transfer.weights import Held, held

log = logging.getLogger("rose.transfer")

BUCKET = 64 << 20
"""Bytes handed to the store at a time."""
MERGE = 4
"""Versions whose deltas are also published as one: who missed some fetches one step, not all."""
BATCH = 4
"""Frames that a thread compares at a time: one takes it less than handing it over would."""
AHEAD = 2
"""Batches per thread: enough that none waits."""
NICE = 19
"""The trainer, and who fetches the version, come first."""
THREADS = 8
"""More would wait for memory; and what they hold, 8 frames each of 1 MB if they are dense, is to be
no more than a bucket."""


@dataclass(frozen=True)
class Report:
    step: Step
    stored: int
    changed: int
    elements: int

    def __str__(self) -> str:
        if self.step.base is None:
            return f"version {self.step.version}: anchor of {self.stored} bytes"
        if not self.changed:
            return f"version {self.step.version} changed nothing"
        share = self.changed / self.elements
        return f"version {self.step.version}: {share:.3%} changed, {self.stored} bytes"


class _Coded(NamedTuple):
    data: bytes
    result: bytes
    changed: int


class _Source(NamedTuple):
    """A piece and how to code a frame of it."""

    tensor: Tensor
    piece: Piece
    code: Callable[[int], _Coded]


NOTHING = _Coded(b"", bytes(16), 0)


class Publisher:
    """`rank` of `ranks` of a trainer; a version is visible once all of them have published it."""

    def __init__(
        self,
        store: Store,
        *,
        wire: str = "bfloat16",
        anchor_every: int = 16,
        compress: bool = True,
        lossy_topk: float | None = None,
        rank: int = 0,
        ranks: int = 1,
        threads: int | None = None,
    ) -> None:
        """`lossy_topk`: the share of elements sent of each version, the largest changes; see
        `lossy`. Lossless without it."""
        if lossy_topk is not None and not 0 < lossy_topk <= 1:
            raise ValueError(f"lossy_topk {lossy_topk} is not a share between 0 and 1")
        self._store = store
        self._wire = wire
        self._lossy_topk = lossy_topk
        self._anchor_every = anchor_every
        self.compress = compress
        """Saves a sixth of the bytes; on links above half a Gb/s it takes one core longer than it
        saves. May be changed between versions."""
        self._rank, self._ranks = rank, ranks
        self._threads = min(threads or len(os.sched_getaffinity(0)), THREADS)
        self._snapshot: dict[Piece, Bits] = {}
        self._tensors: dict[Piece, Tensor] = {}
        self.version: int | None = None
        """The last version published."""
        self._lost = False
        """The snapshot may be between two versions."""
        self._settling: threading.Thread | None = None
        self._recover()

    def publish(self, weights: Any, version: int | None = None) -> Report:
        """Make the weights a new version, one higher than the last unless said otherwise.

        It can be fetched when this returns, and the weights may be changed again.
        """
        self.settle()
        if self._lost:
            self._recover()
        base = self.version
        if version is None:
            version = 0 if base is None else base + 1
        if base is not None and version <= base:
            raise ValueError(f"version {version} is not newer than {base}, the last one published")
        if not 0 <= version < VERSIONS:
            raise ValueError(f"version {version} is not between 0 and {VERSIONS}")
        step = Step(base, version)
        sources = (self._source(one, base is None) for one in held(weights, self._wire))
        manifest = self._write(step, self._complete(sources, base is None))
        self._lost, self.version = True, version
        self._settling = threading.Thread(
            target=self._settle, args=(step, manifest), name="rose-publish"
        )
        self._settling.start()
        report = Report(step, manifest.stored, manifest.changed, manifest.elements)
        log.info("%s", report)
        return report

    def settle(self) -> None:
        """Wait for what the last `publish` has left to do: before its store is closed."""
        if self._settling is not None:
            self._settling.join()
            self._settling = None

    def _settle(self, step: Step, manifest: Manifest) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            self._follow(manifest)
            self._lost = False
            self._tidy(step)
        except (StoreError, TransferError, OSError) as error:
            log.error("version %d is published, but then: %s", step.version, error)

    # ---- comparing

    def _source(self, one: Held, first: bool) -> _Source:
        if first:
            return _Source(one.tensor, one.piece, lambda index: self._code(None, one.frame(index)))
        old, known = self._snapshot.get(one.piece), self._tensors.get(one.piece)
        if old is None or known != one.tensor:
            raise TransferError(
                f"{one.tensor.name} ({one.tensor.dtype}, {one.tensor.shape}) is not what version "
                f"{self.version} has; other tensors need another job"
            )
        return _Source(
            one.tensor,
            one.piece,
            lambda index: self._code(
                _frame(old, index), self._next(one, index, _frame(old, index))
            ),
        )

    def _next(self, one: Held, index: int, old: Bits) -> Bits:
        new = one.frame(index)
        if self._lossy_topk is None:
            return new
        return lossy.largest(old, new, one.tensor.dtype, self._lossy_topk)

    def _complete(self, sources: Iterable[_Source], first: bool) -> Iterator[_Source]:
        missing = set() if first else set(self._snapshot)
        for source in sources:
            missing.discard(source.piece)
            yield source
        if missing:
            raise TransferError(f"{min(missing).tensor} is missing from the weights")

    def _code(self, old: Bits | None, new: Bits) -> _Coded:
        changes = diff(np.zeros_like(new) if old is None else old, new)
        return self._packed(changes, digest(new)) if changes.changed or old is None else NOTHING

    def _packed(self, changes: Changes, result: bytes) -> _Coded:
        return _Coded(frame.pack(changes, compress=self.compress), result, changes.changed)

    # ---- writing

    def _write(self, step: Step, sources: Iterable[_Source]) -> Manifest:
        """Code all frames in order, hand over full buckets, seal."""
        tensors: dict[str, int] = {}
        infos: list[Tensor] = []
        parts: list[Part] = []
        rows: list[tuple[int, int, int, bytes]] = []
        buckets: list[Bucket] = []
        bucket = bytearray()
        changed = 0

        def hand_over() -> None:
            data = bytes(bucket)
            bucket.clear()
            self._store.write(step, self._rank, len(buckets), data)
            buckets.append(Bucket(len(data), digest(data)))

        frames = self._noted(sources, tensors, infos, parts)
        work = (partial(_code_all, batch) for batch in _batches(frames))
        for batch in in_order(work, self._threads, AHEAD * self._threads, "rose-diff"):
            for coded in batch:
                place = (len(buckets), len(bucket)) if coded.data else (0, 0)
                rows.append((*place, len(coded.data), coded.result))
                bucket += coded.data
                changed += coded.changed
                if len(bucket) >= BUCKET:
                    hand_over()
        if bucket:
            hand_over()
        manifest = Manifest(
            job=self._store.job,
            version=step.version,
            base=step.base,
            rank=self._rank,
            ranks=self._ranks,
            tensors=infos,
            parts=parts,
            buckets=buckets,
            frames=np.array(rows, FRAMES).tobytes(),
            changed=changed,
        )
        self._store.seal(manifest)
        return manifest

    def _noted(
        self,
        sources: Iterable[_Source],
        tensors: dict[str, int],
        infos: list[Tensor],
        parts: list[Part],
    ) -> Iterator[tuple[_Source, int]]:
        """Every frame of every source; the lists are filled on the way."""
        first = 0
        for source in sources:
            if source.tensor.name not in tensors:
                tensors[source.tensor.name] = len(infos)
                infos.append(source.tensor)
            parts.append(Part(tensors[source.tensor.name], source.piece.box, first))
            first += source.piece.frames
            for index in range(source.piece.frames):
                yield source, index

    # ---- the snapshot

    def _follow(self, manifest: Manifest) -> None:
        """Make the snapshot what the step leads to, from what the store has of it."""
        for part in manifest.parts:
            tensor, piece = manifest.tensors[part.tensor], manifest.piece(part)
            if manifest.base is None:
                width = UNSIGNED[WIDTHS[tensor.dtype]]
                self._snapshot[piece] = np.zeros(size(piece.box), width)
                self._tensors[piece] = tensor
        everything = [(part, range(manifest.piece(part).frames)) for part in manifest.parts]
        for one in fetch(self._store, manifest, everything):
            old = _frame(self._snapshot[one.piece], one.number)
            patch(old, frame.unpack(one.data))
            if digest(old) != one.result:
                raise TransferError(
                    f"version {manifest.version} was stored wrong: {one.piece.tensor}"
                )

    def _recover(self) -> None:
        """After a restart: the snapshot from what this rank published before."""
        for step in route(self._store.steps(), None):
            mine = self._store.manifests(step)
            if len(mine) != self._ranks:
                raise TransferError(
                    f"job {self._store.job} has {len(mine)} ranks, not {self._ranks}"
                )
            self._follow(mine[self._rank])
            self.version = step.version
        self._lost = False

    # ---- history

    def _tidy(self, step: Step) -> None:
        """Anchors, merged deltas, and an end to old ones."""
        if step.base is None:
            return
        if step.version % MERGE == 0:
            self._merge(step)
        if step.version % self._anchor_every == 0:
            self._write(Step(None, step.version), self._anchor())
            if self._rank == 0:
                self._forget()

    def _anchor(self) -> Iterator[_Source]:
        for piece, bits in self._snapshot.items():
            yield _Source(
                self._tensors[piece],
                piece,
                lambda index, bits=bits: self._code(None, _frame(bits, index)),  # type: ignore[misc]
            )

    def _merge(self, last: Step) -> None:
        """One delta of the last few, if the store still has them all."""
        chain = [last]
        deltas: dict[int | None, Step] = {}
        for step in self._store.steps():
            if step.base is not None:
                deltas[step.version] = step  # of several the shortest: they come in that order
        while len(chain) < MERGE and (before := deltas.get(chain[0].base)) is not None:
            chain.insert(0, before)
        if len(chain) < MERGE:
            return
        manifests = [self._store.manifests(step)[self._rank] for step in chain]

        parts = [{manifest.piece(part): part for part in manifest.parts} for manifest in manifests]

        def code(piece: Piece, index: int) -> _Coded:
            found = [
                one
                for manifest, own in zip(manifests, parts, strict=True)
                for one in fetch(self._store, manifest, [(own[piece], [index])])
            ]
            if not found:
                return NOTHING
            return self._packed(merge([frame.unpack(one.data) for one in found]), found[-1].result)

        newest = manifests[-1]
        sources = (
            _Source(newest.tensors[part.tensor], piece, partial(code, piece))
            for piece, part in parts[-1].items()
        )
        self._write(Step(chain[0].base, last.version), sources)

    def _forget(self) -> None:
        steps = self._store.steps()
        anchors = [step.version for step in steps if step.base is None]
        if len(anchors) > 1:
            oldest = sorted(anchors)[-2]
            for step in steps:
                if step.version < oldest or (step.base is not None and step.base < oldest):
                    self._store.remove(step)


def _batches(frames: Iterator[tuple[_Source, int]]) -> Iterator[list[tuple[_Source, int]]]:
    while batch := list(islice(frames, BATCH)):
        yield batch


def _code_all(batch: list[tuple[_Source, int]]) -> list[_Coded]:
    return [source.code(index) for source, index in batch]


def _frame(bits: Bits, index: int) -> Bits:
    return bits[index * FRAME : (index + 1) * FRAME]
