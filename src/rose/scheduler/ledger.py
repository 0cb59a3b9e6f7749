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
from typing import Any

import msgspec

from rose.claims import claim
from rose.scheduler.turn import Ask, Cut, Span, State, Turn

BATCH_S = 0.02
"""How long records are gathered, and about what a kill loses."""
KEPT_S = 3600.0
"""Results are kept so long for clients that ask again."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (
  id TEXT PRIMARY KEY, job TEXT, state TEXT, ask BLOB, record BLOB, changed REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_state ON turns (state, changed);
"""


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
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(SCHEMA)
        except sqlite3.Error as error:
            self._claim.close()
            raise LedgerError(f"{path}: {error}") from error
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[str, str, bytes, bytes]] = {}
        self._asks: dict[str, bytes] = {}
        """Of turns that are not over: they do not change, and prompts are long."""
        self._work = threading.Event()
        self._stopping = False
        self.failed = ""
        self._thread = threading.Thread(target=self._write, name="rose-ledger", daemon=True)
        self._thread.start()

    def keep(self, turn: Turn) -> None:
        """Have it as it is now, soon. The last word on a turn wins."""
        ask = self._asks.pop(turn.ask.id, None) or msgspec.msgpack.encode(turn.ask)
        if not turn.over:
            self._asks[turn.ask.id] = ask
        kept = msgspec.msgpack.encode(record(turn))
        with self._lock:
            self._waiting[turn.ask.id] = (turn.ask.job, turn.state, ask, kept)
        self._work.set()

    def turns(self) -> Iterator[Turn]:
        """All that are not over; results that somebody may still ask for are found by their id."""
        rows = self._database.execute(
            "SELECT ask, record FROM turns WHERE state NOT IN ('done', 'aborted')"
        )
        for ask, kept in rows:
            yield turn_of(
                msgspec.msgpack.decode(ask, type=Ask), msgspec.msgpack.decode(kept, type=Record)
            )

    def find(self, id_: str) -> Turn | None:
        with self._lock:
            waiting = self._waiting.get(id_)
        row = (
            waiting[2:]
            if waiting
            else self._database.execute(
                "SELECT ask, record FROM turns WHERE id = ?", (id_,)
            ).fetchone()
        )
        if row is None:
            return None
        return turn_of(
            msgspec.msgpack.decode(row[0], type=Ask), msgspec.msgpack.decode(row[1], type=Record)
        )

    def close(self) -> None:
        self._stopping = True
        self._work.set()
        self._thread.join()
        self._database.close()
        self._claim.close()

    # ---- the thread

    def _write(self) -> None:
        while True:
            self._work.wait()
            stopping = self._stopping
            if not stopping:
                time.sleep(BATCH_S)
            self._work.clear()
            with self._lock:
                batch = dict(self._waiting)
            if batch and self._put(batch):
                with self._lock:
                    for id_, row in batch.items():
                        if self._waiting.get(id_) is row:
                            del self._waiting[id_]
            if stopping:
                return

    def _put(self, batch: dict[str, tuple[str, str, bytes, bytes]]) -> bool:
        now = time.time()
        rows = [(id_, *row, now) for id_, row in batch.items()]
        try:
            self._database.execute("BEGIN")
            self._database.executemany("REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._database.execute(
                "DELETE FROM turns WHERE state IN ('done', 'aborted') AND changed < ?",
                (now - KEPT_S,),
            )
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
