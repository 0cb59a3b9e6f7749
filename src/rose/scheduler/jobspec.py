"""A job on the command line: `NAME,share=2,max_staleness=1,...`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from rose.scheduler.job import Job
from rose.scheduler.weights import Source
from rose.transfer.store import open_store


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    share: float = 1.0
    """Of the fleet, against other jobs that want it too."""
    most_running: int = 1 << 30
    max_borrowed: int = 1 << 30
    max_staleness: int | None = None
    per_version: int | None = None
    weights: str = ""
    """Store whose newest version is current, such as tcp://HOST:PORT; its job has the same name."""
    folder: str = ""
    """On engines' hosts, for their copy of the weights."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"{self.name!r} cannot be a job's name")
        for name, least in (("share", 0.01), ("most_running", 1), ("max_borrowed", 0),
                            ("max_staleness", 0), ("per_version", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name} is {value}, less than {least:g}")

    @property
    def job(self) -> Job:
        return Job(
            self.name,
            self.share,
            self.most_running,
            self.max_borrowed,
            self.max_staleness,
            self.per_version,
        )

    @property
    def source(self) -> Source | None:
        folder = self.folder or str(Path(tempfile.gettempdir(), "rose-weights", self.name))
        return Source(self.weights, self.name, folder) if self.weights else None


def parse(text: str) -> JobSpec:
    """Raises ValueError with what is wrong."""
    name, *options = text.split(",")
    said: dict[str, str] = {"name": name}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key in said:
            raise ValueError(f"{option!r} is not KEY=VALUE, or said twice")
        said[key] = value
    try:
        spec = msgspec.convert(said, JobSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if spec.weights:
        open_store(spec.weights, spec.name)  # connects to nobody yet, but knows what it cannot be
    return spec
