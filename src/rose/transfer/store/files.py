"""`file://`: steps in a directory or on a shared mount.

    ROOT/JOB/VERSION-from-BASE/rank-R/bucket-N
                                     /manifest      written last, under another name first

A step without all its manifests is not there. What a killed publisher left of one is overwritten by
the next attempt.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import IO

from rose.transfer import manifest as manifests
from rose.transfer.manifest import Manifest, ManifestError, Step, check_job
from rose.transfer.store.base import NEWS_S, StoreError, has_news

log = logging.getLogger("rose.transfer")

LOOK_S = 0.02
"""How often a folder is looked at while somebody waits for news."""
FOLDER = re.compile(r"(\d{10})-from-(\d{10}|nothing)")


class FileStore:
    def __init__(self, root: Path, job: str) -> None:
        self.job = check_job(job)
        self._folder = root / job
        self._folder.mkdir(parents=True, exist_ok=True)
        self._claims: dict[int, IO[str]] = {}
        self._claiming = threading.Lock()
        self._costs: dict[Step, int] = {}
        self._damaged: set[Path] = set()
        self._sealed = threading.Condition()

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()

    def steps(self, after: int | None = None) -> dict[Step, int]:
        found, until = self._steps(), time.monotonic() + NEWS_S
        while after is not None and not has_news(found, after) and time.monotonic() < until:
            with self._sealed:
                self._sealed.wait(LOOK_S)  # another process may have sealed it
            found = self._steps()
        return found

    def _steps(self) -> dict[Step, int]:
        found = {}
        for entry in os.scandir(self._folder):
            if (name := FOLDER.fullmatch(entry.name)) is None:
                continue
            step = Step(None if name[2] == "nothing" else int(name[2]), int(name[1]))
            if (cost := self._cost(step)) is not None:
                found[step] = cost
        for gone in self._costs.keys() - found.keys():
            del self._costs[gone]
        return dict(sorted(found.items(), key=lambda item: _order(item[0])))

    def manifests(self, step: Step) -> list[Manifest]:
        first = self._manifest(step, 0)
        return [first, *(self._manifest(step, rank) for rank in range(1, first.ranks))]

    def read(self, step: Step, rank: int, bucket: int, offset: int, length: int) -> bytes:
        path = self._bucket(step, rank, bucket)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(length)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        if len(data) != length:
            raise StoreError(
                f"{path} is truncated: {offset + len(data)} bytes of {offset + length}"
            )
        return data

    def draft(self, step: Step, rank: int, bucket: int) -> Path:
        """Where a bucket of a step that is not sealed yet may be written piece by piece."""
        path = self._bucket(step, rank, bucket)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def file(self, step: Step, rank: int, bucket: int, end: int) -> Path:
        """Where a sealed bucket is; it must have so many bytes."""
        path = self._bucket(step, rank, bucket)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        if not 0 <= end <= size or not (path.parent / "manifest").exists():
            raise StoreError(f"{path} has no byte {end}, or is not published")
        return path

    def write(self, step: Step, rank: int, bucket: int, data: bytes) -> None:
        path = self._bucket(step, rank, bucket)
        self._claim(rank)
        try:
            if step in self.steps():
                raise StoreError(f"version {step.version} of job {self.job} is already published")
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "manifest").unlink(missing_ok=True)  # of an attempt that others missed
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error

    def seal(self, manifest: Manifest) -> None:
        folder = self._rank(manifest.step, manifest.rank)
        self._claim(manifest.rank)
        draft = folder / "manifest.draft"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(manifests.encode(manifest))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(folder / "manifest")
            for changed in (folder, folder.parent, self._folder):
                _sync(changed)
            with self._sealed:
                self._sealed.notify_all()
        except OSError as error:
            raise StoreError(f"{draft}: {error.strerror}") from error

    def remove(self, step: Step) -> None:
        """Its manifests first: a half-removed step is not there."""
        for path in self._step(step).glob("rank-*/manifest"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._step(step), ignore_errors=True)

    def _claim(self, rank: int) -> None:
        """One publisher per rank; the kernel ends the claim of one that dies."""
        with self._claiming:
            if rank in self._claims:
                return
            claim = (self._folder / f"publisher-{rank}").open("w")
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                claim.close()
                said = f"job {self.job} already has a publisher of rank {rank}"
                raise StoreError(said) from error
            self._claims[rank] = claim

    def _cost(self, step: Step) -> int | None:
        """Its bytes; None when it is not complete. What is sealed does not change any more."""
        if step not in self._costs:
            try:
                self._costs[step] = sum(manifest.stored for manifest in self.manifests(step))
            except StoreError:
                return None
        return self._costs[step]

    def _manifest(self, step: Step, rank: int) -> Manifest:
        path = self._rank(step, rank) / "manifest"
        try:
            found = manifests.decode(path.read_bytes())
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        except ManifestError as error:
            if path not in self._damaged:
                log.warning("%s: %s", path, error)
            self._damaged.add(path)
            raise StoreError(f"{path}: {error}") from error
        if (found.job, found.step, found.rank) != (self.job, step, rank):
            raise StoreError(f"{path} is of version {found.version} of job {found.job}")
        return found

    def _step(self, step: Step) -> Path:
        base = "nothing" if step.base is None else f"{step.base:010d}"
        return self._folder / f"{step.version:010d}-from-{base}"

    def _rank(self, step: Step, rank: int) -> Path:
        return self._step(step) / f"rank-{rank}"

    def _bucket(self, step: Step, rank: int, bucket: int) -> Path:
        return self._rank(step, rank) / f"bucket-{bucket}"


def _order(step: Step) -> tuple[int, int]:
    return step.version, -1 if step.base is None else step.base


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
