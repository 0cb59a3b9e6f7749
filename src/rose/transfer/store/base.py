"""What a store does. Steps become visible whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from rose.transfer.manifest import Manifest, Step

NEWS_S = 0.25
"""How long a store lets somebody wait for news: not long, as who waits does nothing else."""


class StoreError(RuntimeError):
    """The store could not do it; what was there before is still there."""


def has_news(steps: Iterable[Step], after: int) -> bool:
    return any(step.version > after for step in steps)


class Store(Protocol):
    """The steps of one job."""

    job: str

    def steps(self, after: int | None = None) -> dict[Step, int]:
        """Those that are complete and their bytes; oldest version first, then oldest base.

        With `after`, as soon as there is a newer version than that, or else after `NEWS_S`.
        """

    def manifests(self, step: Step) -> list[Manifest]:
        """Of all ranks, in their order. `StoreError` if the step is not complete."""

    def read(self, step: Step, rank: int, bucket: int, offset: int, length: int) -> bytes:
        """Exactly so many bytes, or `StoreError`."""

    def write(self, step: Step, rank: int, bucket: int, data: bytes) -> None:
        """A bucket of a step that is not sealed yet; again after a failure, if need be."""

    def seal(self, manifest: Manifest) -> None:
        """This rank's part is complete: make it durable, then visible."""

    def remove(self, step: Step) -> None:
        """Forget a step; readers in the middle of it get `StoreError`."""

    def close(self) -> None:
        """Nothing more is asked; who still waits for something gets `StoreError` soon."""
