"""The control page: one small shared-memory file through which a device's processes see each other.

Layout (little endian, all offsets fixed, `LAYOUT` changes with it):

    0     header    magic, layout, size, physical KV bytes, device name
    128   bells     four 32-bit words, one per waiter; rung by whoever has news for it
    144   arrivals  requests that serving has taken: a word, written before anything else is done
    152   rival     when a second serving engine last said that it is here
    256   serving   section written by the serving engine only
    1024  rollout   section written by the rollout engine only
    1792  node      section written by the node agent only
    2560  end

A section is `crc32, pid, pid's start time` and a packed facts record, written in one call: a writer
that is stopped, or waits for Python's lock, leaves it whole. A reader that sees a wrong checksum
looks again, and after a few looks calls the section unreadable. Reads and writes are `pread` and
`pwrite`, not loads and stores: a page that someone truncates gives a short read instead of SIGBUS
in the serving engine. Waiting is by futex on the bell words; nobody polls.

A section has one owner: the process that holds the kernel's lock on its bytes (`own`). The lock
ends with the process, however it dies. A second serving engine (a rolling restart) cannot own the
section, so it says on the `rival` word that it is here, until it can.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from rose.executor import futex
from rose.executor.facts import ENUMS, FACTS_S, NodeOrders, RolloutFacts, ServingFacts
from rose.executor.processes import Kernel, Processes, Writer, is_alive, process_start

MAGIC = b"ROSEPAGE"
VERSION = 2
SIZE = 2560
BELLS = 128
BELL = {"serving": BELLS, "gate": BELLS + 4, "watch": BELLS + 8, "node": BELLS + 12}
"""serving: the rollout's claim changed. gate: serving's facts changed. watch: serving needs memory,
or the node gave an order. node: the rollout engine carried out an order."""
ARRIVALS, RIVAL = 144, 152
SECTION = {"serving": 256, "rollout": 1024, "node": 1792}
SECTION_SIZE = 768
READ_ATTEMPTS = 8
"""The kernel copies a section in less than a microsecond; eight looks outlast any live writer."""

_HEADER = struct.Struct("<8sIIQ64s")
_PREFIX = struct.Struct("<QQQ")
_WRITER = struct.Struct("<QQ")
_BELL = struct.Struct("<I")
_ARRIVALS = struct.Struct("<Q")
_RIVAL = struct.Struct("<d")
_LOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock` on 64-bit Linux: type, whence, start, length, pid."""

F = TypeVar("F", ServingFacts, RolloutFacts, NodeOrders)


class PageError(Exception):
    """The page cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Reading(Generic[F]):
    facts: F
    writer: Writer


def _writer(section: bytes) -> Writer:
    _, pid, started = _PREFIX.unpack_from(section)
    return Writer(pid, started)


def _crc(writer: Writer, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_WRITER.pack(writer.pid, writer.started)))


def _live_writer(page: bytes) -> Writer | None:
    whole = page.ljust(SIZE, b"\0")
    writers = (_writer(whole[where : where + _PREFIX.size]) for where in SECTION.values())
    return next((writer for writer in writers if is_alive(writer)), None)


class _Codec:
    def __init__(self, kind: type[ServingFacts | RolloutFacts | NodeOrders]) -> None:
        defaults = msgspec.structs.astuple(kind())
        codes = ["d" if isinstance(value, float) else "q" for value in defaults]
        self.kind = kind
        self.struct = struct.Struct("<" + "".join(codes))
        self.shape = (kind.__struct_fields__, codes)
        assert _PREFIX.size + self.struct.size <= SECTION_SIZE

    def pack(self, facts: ServingFacts | RolloutFacts | NodeOrders) -> bytes:
        return self.struct.pack(*msgspec.structs.astuple(facts))

    def unpack(self, payload: bytes) -> ServingFacts | RolloutFacts | NodeOrders:
        return self.kind(*self.struct.unpack(payload))


_CODECS = {
    "serving": _Codec(ServingFacts),
    "rollout": _Codec(RolloutFacts),
    "node": _Codec(NodeOrders),
}
_NUMBERS = [[(member.name, int(member)) for member in kind] for kind in ENUMS]
_FINGERPRINT = zlib.crc32(repr((_NUMBERS, [codec.shape for codec in _CODECS.values()])).encode())
LAYOUT = VERSION << 24 | _FINGERPRINT & 0xFFFFFF
"""Version and a fingerprint of all fields and numbers: engines of different builds never misread
each other."""


def _header(kv_total: int, device: str) -> bytes:
    return _HEADER.pack(MAGIC, LAYOUT, SIZE, kv_total, device.encode()[:64])


class Page:
    """An open page. `create` makes the file, `open` attaches to an existing one."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        kv_total: int,
        device: str,
        me: Writer | None = None,
        processes: Processes | None = None,
    ) -> None:
        """`me` and `processes` are this process and those of this host, unless simulated."""
        self.path = path
        self.processes = processes or Kernel()
        self.kv_total = kv_total
        self.device = device
        self._fd = descriptor
        self._map = mmap.mmap(descriptor, SIZE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._rung = int.from_bytes(os.urandom(4))  # a bell need only show something new
        self._me = me or Writer(os.getpid(), process_start(os.getpid()) or 0)

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        kv_total: int,
        device: str,
        me: Writer | None = None,
        processes: Processes | None = None,
    ) -> Page:
        """Make the page, or take over one of the same device and size that is already there.

        The file is filled in place and under a lock, never replaced: engines that start at once, or
        have it open already, must not end up with two different pages.
        """
        header = _header(kv_total, device)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PageError(f"page {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            old = os.pread(descriptor, SIZE, 0)
            known = old[: len(header)]
            if known.strip(b"\0") and not known.startswith(MAGIC):
                raise PageError(f"page {path} is not a rose control page")
            if known.startswith(MAGIC) and known != header:
                if user := _live_writer(old):
                    raise PageError(
                        f"page {path} is in use for another device or size by process {user.pid}; "
                        "stop it or choose another page"
                    )
                os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, max(SIZE, os.fstat(descriptor).st_size))
            os.pwrite(descriptor, header, 0)
        finally:
            os.close(descriptor)
        return cls.open(path, me=me, processes=processes)

    @classmethod
    def open(
        cls, path: Path, *, me: Writer | None = None, processes: Processes | None = None
    ) -> Page:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PageError(f"page {path}: {error.strerror}") from error
        try:
            header = os.pread(descriptor, _HEADER.size, 0)
            if len(header) < _HEADER.size or os.fstat(descriptor).st_size < SIZE:
                raise PageError(f"page {path} is truncated; let `rose node` make it anew")
            magic, layout, size, kv_total, device = _HEADER.unpack(header)
            if magic != MAGIC:
                raise PageError(f"page {path} is not a rose control page")
            if (layout, size) != (LAYOUT, SIZE):
                raise PageError(
                    f"page {path} has layout {layout}, this rose speaks layout {LAYOUT}; "
                    "run the same rose in the node and both engines"
                )
            name = device.rstrip(b"\0").decode(errors="replace")
            return cls(path, descriptor, kv_total, name, me, processes)
        except OSError as error:
            os.close(descriptor)
            raise PageError(f"page {path}: {error.strerror}") from error
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        self._map.close()  # it holds a descriptor of its own, and with it what we own
        os.close(self._fd)
        self._fd = -1
        self.processes.close()

    def _lock(self, kind: int, start: int, length: int) -> None:
        lock = _LOCK.pack(kind, os.SEEK_SET, start, length, 0)
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)

    def own(self, section: str) -> bool:
        """Become the section's only writer, for as long as this page is open; False when another
        process (or another open page) is."""
        try:
            self._lock(fcntl.F_WRLCK, SECTION[section], SECTION_SIZE)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def mend(self, clock: Callable[[], float]) -> bool:
        """Write the header again if something damaged it; True when it did.

        The sections heal with their writers' next word. Nobody else writes the header, and without
        it no restarted engine or node could attach again.
        """
        header = _header(self.kv_total, self.device)
        if not self._intruded() <= clock():
            self.intrude(0.0)  # no time at all, or one that has not come: garbage
        size = os.fstat(self._fd).st_size
        if size >= SIZE and os.pread(self._fd, len(header), 0) == header:
            return False
        os.ftruncate(self._fd, max(SIZE, size))
        os.pwrite(self._fd, header, 0)
        return True

    def publish(self, section: str, facts: ServingFacts | RolloutFacts | NodeOrders) -> None:
        payload = _CODECS[section].pack(facts)
        me = self._me
        prefix = _PREFIX.pack(_crc(me, payload), me.pid, me.started)
        os.pwrite(self._fd, prefix + payload, SECTION[section])

    def arrive(self, count: int) -> None:
        """Serving's own thread has taken a request: void every window that does not know it."""
        os.pwrite(self._fd, _ARRIVALS.pack(count), ARRIVALS)

    def arrivals(self) -> int:
        """Requests taken by serving so far; -1 when that cannot be read."""
        raw = os.pread(self._fd, _ARRIVALS.size, ARRIVALS)
        return int(_ARRIVALS.unpack(raw)[0]) if len(raw) == _ARRIVALS.size else -1

    def intrude(self, now: float) -> None:
        """A serving engine that does not own the section says that it is here."""
        os.pwrite(self._fd, _RIVAL.pack(now), RIVAL)

    def rival(self, now: float) -> bool:
        """Whether a second serving engine is here: what the first one says is not all then."""
        return not self._intruded() <= now - 2 * FACTS_S

    def _intruded(self) -> float:
        raw = os.pread(self._fd, _RIVAL.size, RIVAL)
        return float(_RIVAL.unpack(raw)[0]) if len(raw) == _RIVAL.size else math.nan

    def lending(self, clock: Callable[[], float]) -> Reading[ServingFacts] | None:
        """Serving's half if it can be relied upon at this moment: readable, new, and of the only
        serving engine. Nothing else is a reason to run on its device, or to keep its memory.

        The clock is read last: facts that come meanwhile would be of a time that has not come.
        """
        reading = self.serving()
        now = clock()
        if reading is None or not reading.facts.fresh(now) or self.rival(now):
            return None
        return reading

    def serving(self) -> Reading[ServingFacts] | None:
        return self._read("serving")

    def rollout(self) -> Reading[RolloutFacts] | None:
        return self._read("rollout")

    def node(self) -> Reading[NodeOrders] | None:
        return self._read("node")

    def _read(self, section: str) -> Reading[Any] | None:
        """The section's record; None when it was never written, is torn, or cannot be true."""
        codec = _CODECS[section]
        length = _PREFIX.size + codec.struct.size
        for _ in range(READ_ATTEMPTS):
            raw = os.pread(self._fd, length, SECTION[section])
            if len(raw) < length:
                return None
            crc, pid, started = _PREFIX.unpack_from(raw)
            writer, payload = Writer(pid, started), raw[_PREFIX.size :]
            if not pid:
                return None
            if _crc(writer, payload) != crc:
                continue
            facts = codec.unpack(payload)
            return None if facts.implausible() else Reading(facts, writer)
        return None

    def rollout_writer(self) -> Writer | None:
        """The process named in the rollout section, even if the rest is garbage: one that was
        stopped while it wrote. None when a truncated page no longer names it."""
        raw = os.pread(self._fd, _PREFIX.size, SECTION["rollout"])
        return _writer(raw) if len(raw) == _PREFIX.size else None

    def rollout_writer_alive(self) -> bool:
        """True also when nobody knows who it is: memory is not taken on a guess."""
        writer = self.rollout_writer()
        return writer is None or self.processes.alive(writer)

    def bell(self, name: str) -> int:
        raw = os.pread(self._fd, 4, BELL[name])
        return int(_BELL.unpack(raw)[0]) if len(raw) == 4 else 0

    def ring(self, name: str) -> None:
        self._rung = (self._rung + 1) & 0xFFFFFFFF
        os.pwrite(self._fd, _BELL.pack(self._rung), BELL[name])
        futex.wake_all(self._address + BELL[name])

    def wait(self, name: str, seen: int, timeout_s: float) -> bool:
        """Sleep until the bell has rung since `seen`; False when the time ran out."""
        try:
            return futex.wait(self._address + BELL[name], seen, timeout_s)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            time.sleep(timeout_s)  # a truncated page has no bells
            return False

    def describe(self) -> dict[str, Any]:
        """Everything on the page as JSON has it: a deadline that is never is null."""
        shown: dict[str, Any] = {
            "path": str(self.path),
            "layout": LAYOUT,
            "device": self.device,
            "kv_total": self.kv_total,
            "bells": {name: self.bell(name) for name in BELL},
        }
        for section in SECTION:
            reading = self._read(section)
            shown[section] = reading and {
                "pid": reading.writer.pid,
                "alive": self.processes.alive(reading.writer),
                **{
                    name: value if math.isfinite(value) else None
                    for name, value in msgspec.structs.asdict(reading.facts).items()
                },
            }
        return shown
