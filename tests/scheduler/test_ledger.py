"""What survives: turns as they were, the last word on each, until nobody can want them."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from rose.scheduler import ledger as keeping
from rose.scheduler.ledger import Ledger, LedgerError
from rose.scheduler.turn import Ask, Chunk, Cut, State, Turn


def turn(id_: str = "a/0.0") -> Turn:
    asked = Ask(id=id_, job="a", prompt=[1, 2], max_tokens=9, sampling={"stop": ["x"]}, seed=3)
    made = Turn(asked, 1.0)
    made.take(Chunk([5, 6], [{"logprob": -0.5}, None]), "7", 2.0)
    made.cuts.append(Cut.LOST)
    return made


def test_turns_come_back_as_they_were(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "l.sqlite")
    kept, over = turn(), turn("b/0.0")
    over.state, over.finish = State.DONE, "stop"
    first.keep(kept)
    first.keep(over)
    kept.take(Chunk([8], [None]), "8", 3.0)
    first.keep(kept)
    first.close()
    again = Ledger(tmp_path / "l.sqlite")
    found = {one.ask.id: one for one in again.turns()}
    assert found["a/0.0"].tokens == [5, 6, 8]
    assert (found["a/0.0"].ask, found["a/0.0"].spans) == (kept.ask, kept.spans)
    assert (found["a/0.0"].logprobs, found["a/0.0"].cuts) == (kept.logprobs, [Cut.LOST])
    assert list(found) == ["a/0.0"]
    result = again.find("b/0.0")
    assert result is not None and result.state == State.DONE
    assert again.find("c/0.0") is None
    again.close()


def test_what_is_not_written_yet_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "BATCH_S", 0.3)
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.keep(turn())
    found = ledger.find("a/0.0")
    assert found is not None and found.tokens == [5, 6]
    time.sleep(0.1)
    closing = threading.Thread(target=ledger.close)  # while records are gathered
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_old_results_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    done = turn()
    done.state = State.DONE
    ledger.keep(done)
    ledger.keep(turn("b/0.0"))
    ledger.close()
    monkeypatch.setattr(keeping, "KEPT_S", -1.0)
    again = Ledger(tmp_path / "l.sqlite")
    again.keep(turn("c/0.0"))
    deadline = time.monotonic() + 10
    while again.find("a/0.0") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert {one.ask.id for one in again.turns()} == {"b/0.0", "c/0.0"}
    again.close()


def test_one_scheduler_per_ledger(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "l.sqlite")
    with pytest.raises(LedgerError, match="another scheduler"):
        Ledger(tmp_path / "l.sqlite")
    first.close()
    Ledger(tmp_path / "l.sqlite").close()


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "l.sqlite"
    bad.write_text("nothing of the kind, and longer than a header would be" * 50)
    with pytest.raises(LedgerError, match=r"l\.sqlite"):
        Ledger(bad)


def test_one_of_another_release_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE turns (id TEXT)")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"l\.sqlite: another release"):
        Ledger(path)
    assert path.read_bytes() == before


def test_what_is_asked_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is found whatever part of a turn is on its way to the file."""
    monkeypatch.setattr(keeping, "BATCH_S", 0.0)
    ledger = Ledger(tmp_path / "l.sqlite")
    going = turn()
    for token in range(200):
        going.take(Chunk([token]), "7", 3.0)
        ledger.keep(going)
        found = ledger.find("a/0.0")
        assert found is not None and (found.ask, found.tokens) == (going.ask, going.tokens)
    ledger.close()
    again = Ledger(tmp_path / "l.sqlite")
    (restored,) = again.turns()
    restored.state = State.DONE
    again.keep(restored)
    again.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "l.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM asks").fetchone() == (1,)
        assert database.execute("SELECT state FROM records").fetchone() == ("done",)
