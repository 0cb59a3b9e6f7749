"""What survives the scheduler: every turn that was taken, its tokens so far, its result.

SQLite in WAL mode. Writing goes on in a thread of its own, in batches: the hot path only puts
records on a list, and no client waits for the disk. What a kill loses is the last batch: turns that
go on from fewer tokens, results that are made again. Clients that were answered ask no more; those
that were not get one result, of which they have seen nothing unless they were streaming.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rose.claims import claim
from rose.scheduler.turn import Ask, Cut, Span, State, Turn

BATCH_S = 0.02
"""How long records are gathered, and about what a kill loses."""
KEPT_S = 3600.0
"""Results are kept so long for clients that ask again."""
TIDY_S = 60.0
"""How often those that are older are looked for."""
LAYOUT = 2
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS asks (id TEXT PRIMARY KEY, ask BLOB);
CREATE TABLE IF NOT EXISTS records (id TEXT PRIMARY KEY, state TEXT, record BLOB, changed REAL);
CREATE INDEX IF NOT EXISTS by_state ON records (state, changed);
PRAGMA user_version = {LAYOUT};
"""
"""What is asked is long and never changes, so it is written once."""
OLD = "SELECT id FROM records WHERE state IN ('done', 'aborted') AND changed < ?"


class Record(msgspec.Struct):
    """What became of a turn, so far."""

    state: State
    arrived: float
    attempt: int
    tokens: list[int]
    logprobs: list[Any]
    spans: list[Span]
    finish: str | None
    stop: int | str | None
    error: str
    status: int
    cuts: list[Cut]


def record(turn: Turn) -> Record:
    return Record(
        turn.state, turn.arrived, turn.attempt, turn.tokens, turn.logprobs, turn.spans,
        turn.finish, turn.stop, turn.error, turn.status, turn.cuts,
    )  # fmt: skip


def turn_of(ask: Ask, kept: Record) -> Turn:
    return Turn(
        ask, kept.arrived, kept.state, None, kept.attempt, kept.tokens, kept.logprobs, kept.spans,
        kept.finish, kept.stop, kept.error, kept.status, cuts=kept.cuts,
    )  # fmt: skip


def _decode(ask: bytes, kept: bytes) -> Turn:
    return turn_of(msgspec.msgpack.decode(ask, type=Ask), msgspec.msgpack.decode(kept, type=Record))


class Row(NamedTuple):
    """Waits to be written; without what is asked if that is known."""

    state: State
    ask: bytes | None
    kept: bytes


class LedgerError(RuntimeError):
    """The file cannot be used; nothing was lost that was durable."""


class Ledger:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._claim = claim(path.with_name(f"{path.name}.lock"))
        except BlockingIOError as error:
            raise LedgerError(f"{path} is the ledger of another scheduler") from error
        except OSError as error:
            raise LedgerError(f"{path}: {error}") from error
        try:
            self._database = _open(path)
            self._reading = _open(path)  # one connection would wait for the other's disk
        except (sqlite3.Error, LedgerError) as error:
            self._claim.close()
            raise LedgerError(f"{path}: {error}") from error
        self._lock = threading.Lock()
        self._waiting: dict[str, Row] = {}
        self._begun: set[str] = set()
        """Turns that are not over and whose ask is written, or waits to be."""
        self._tidied = 0.0
        self._work = threading.Event()
        self._stopping = False
        self.failed = ""
        self._thread = threading.Thread(target=self._write, name="rose-ledger", daemon=True)
        self._thread.start()

    def keep(self, turn: Turn) -> None:
        """Have it as it is now, soon. The last word on a turn wins."""
        id_ = turn.ask.id
        ask = None if id_ in self._begun else msgspec.msgpack.encode(turn.ask)
        (self._begun.discard if turn.over else self._begun.add)(id_)
        kept = msgspec.msgpack.encode(record(turn))
        with self._lock:
            if ask is None and (before := self._waiting.get(id_)) is not None:
                ask = before.ask
            self._waiting[id_] = Row(turn.state, ask, kept)
        self._work.set()

    def turns(self) -> Iterator[Turn]:
        """All that are not over; results that somebody may still ask for are found by their id."""
        rows = self._reading.execute(
            "SELECT ask, record FROM records JOIN asks USING (id) "
            "WHERE state NOT IN ('done', 'aborted')"
        )
        for ask, kept in rows:
            turn = _decode(ask, kept)
            self._begun.add(turn.ask.id)
            yield turn

    def find(self, id_: str) -> Turn | None:
        with self._lock:
            waiting = self._waiting.get(id_)
        row = self._reading.execute(
            "SELECT ask, record FROM records JOIN asks USING (id) WHERE id = ?", (id_,)
        ).fetchone()
        if waiting is not None:
            row = (waiting.ask or row[0], waiting.kept)
        return _decode(*row) if row else None

    def close(self) -> None:
        self._stopping = True
        self._work.set()
        self._thread.join()
        self._reading.close()
        self._database.close()
        self._claim.close()

    # ---- the thread

    def _write(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            stopping = self._stopping
            if not stopping:
                time.sleep(BATCH_S)
            with self._lock:
                batch = dict(self._waiting)
            if batch and self._put(batch):
                with self._lock:
                    for id_, row in batch.items():
                        if self._waiting.get(id_) is row:
                            del self._waiting[id_]
            if stopping:
                return

    def _put(self, batch: dict[str, Row]) -> bool:
        now = time.time()
        asks = [(id_, row.ask) for id_, row in batch.items() if row.ask is not None]
        records = [(id_, row.state, row.kept, now) for id_, row in batch.items()]
        try:
            self._database.execute("BEGIN")
            self._database.executemany("REPLACE INTO asks VALUES (?, ?)", asks)
            self._database.executemany("REPLACE INTO records VALUES (?, ?, ?, ?)", records)
            if now - self._tidied > TIDY_S:
                self._tidied, old = now, (now - KEPT_S,)
                self._database.execute(f"DELETE FROM asks WHERE id IN ({OLD})", old)
                self._database.execute(f"DELETE FROM records WHERE id IN ({OLD})", old)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self.failed = f"{self._path}: {error}"
            self._work.set()
            time.sleep(1.0)
            return False
        self.failed = ""
        return True


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (layout,) = database.execute("PRAGMA user_version").fetchone()
    if tables and layout != LAYOUT:
        database.close()
        raise LedgerError("another release of rose wrote it, and has to end its turns")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.executescript(SCHEMA)
    return database
