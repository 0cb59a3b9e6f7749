"""What surrounds the parts of the executor in their tests: processes, blocks of memory, time."""

from __future__ import annotations

from dataclasses import dataclass, field

from rose.executor.processes import Writer


@dataclass
class Table:
    """A host's processes, as a test says they are."""

    dead: set[Writer] = field(default_factory=set)
    frozen: set[Writer] = field(default_factory=set)
    killed: list[Writer] = field(default_factory=list)

    def alive(self, writer: Writer) -> bool:
        return writer.pid > 0 and writer not in self.dead

    def close(self) -> None: ...

    def stopped(self, writer: Writer) -> bool:
        return writer in self.frozen

    def kill(self, writer: Writer) -> None:
        self.killed.append(writer)


@dataclass
class Blocks:
    """A quota on blocks of which requests hold some."""

    blocks: int
    block_bytes: int = 1
    usable: int = 0
    used: int = 0
    backed: int = 0
    """Usable ones that have their memory."""

    @property
    def usable_bytes(self) -> int:
        return self.usable * self.block_bytes

    def bring(self, blocks: int) -> bool:
        self.backed = min(self.backed + blocks, self.usable)
        return self.backed < self.usable

    def set_usable(self, wanted: int) -> int:
        self.usable = max(self.used, min(wanted, self.blocks))
        self.backed = min(self.backed, self.usable)
        return self.usable


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
