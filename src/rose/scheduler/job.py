"""A job: its share and limits, its turns that wait, the weights that it wants."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rose.scheduler.fleet import Engine
from rose.scheduler.order import Lengths


@dataclass
class Job:
    """`share`: of the fleet, against other jobs that want it too."""

    name: str
    share: float = 1.0
    most_running: int = 1 << 30
    max_borrowed: int = 1 << 30
    """Devices that it may use at once beside dedicated ones."""
    max_staleness: int | None = None
    """Versions that an engine may be behind; None: any, once it had the current one."""
    per_version: int | None = None
    """Trajectories that a step of the trainer takes; None: not known, all may begin at once."""
    version: int | None = None
    """The newest, if versions are numbers that we were told."""
    source: tuple[str, str] | None = None
    """Store and job that its versions are of, if engines are led to them."""
    asked: bool = True
    """Its store has been asked what is current, or there is none to ask: until then an engine may
    have anything."""
    first: int = 0
    begun: int = 0
    """Trajectories since version `first`."""
    turns: int = 0
    """That have ended."""
    held: deque[str] = field(default_factory=deque)
    """First turns of trajectories that would be stale before a trainer gets to them."""
    running: int = 0
    waiting: int = 0
    queue: list[tuple[float, int, str]] = field(default_factory=list)
    """A heap; turns that no longer wait are left out when they come up, or are too many."""
    lengths: Lengths = field(default_factory=Lengths)

    def behind(self, engine: Engine) -> int | None:
        """Versions; None if they cannot be told."""
        if self.version is None or not engine.serves(self.name) or not engine.version.isdigit():
            return None
        return self.version - int(engine.version)

    def owns(self, engine: Engine) -> bool:
        """It has the job's weights, or will have them."""
        return engine.serves(self.name) and self.source in (None, engine.owner)

    def may_use(self, engine: Engine) -> bool:
        if not self.owns(engine):
            return False
        if self.version is None:
            return self.asked
        if self.source is not None and engine.source != self.source:
            return False
        behind = self.behind(engine)
        if behind is None or int(engine.version) < engine.due.get(self.name, 0):
            return False
        return self.max_staleness is None or behind <= self.max_staleness

    def lead(self, version: int) -> None:
        """This is the newest version now."""
        if self.version is None:
            self.first = version
        self.version = version

    @property
    def may_begin(self) -> bool:
        """Whether another trajectory would be trained on while its weights are fresh enough: as
        many may have begun as all steps up to `max_staleness` from now take."""
        if self.per_version is None or self.version is None:
            return True
        steps = self.version - self.first + 1 + (self.max_staleness or 0)
        return self.begun < self.per_version * steps
