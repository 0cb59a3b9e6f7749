"""What a node remembers on disk, and that nothing waits for it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rose.cluster import memo as module
from rose.cluster.config import ConfigError, NodeConfig
from rose.cluster.engine import Engine
from rose.cluster.memo import Memo

Full = Callable[[bool], None]


@pytest.fixture
def memo(tmp_path: Path) -> Memo:
    return Memo(tmp_path / "page.json", tmp_path / "logs" / "taken-back-cpu0")


@pytest.fixture
def disk_is_full(monkeypatch: pytest.MonkeyPatch) -> Full:
    write = Path.write_text
    full = [False]

    def write_text(self: Path, text: str) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", write_text)

    def say(it_is: bool) -> None:
        full[0] = it_is

    return say


@pytest.fixture
def engine() -> Iterator[Engine]:
    child = subprocess.Popen(["sleep", "600"])
    yield Engine("rollout", "http://127.0.0.1:1", child.pid, Path("/dev/null"))
    child.kill()
    child.wait()


def again(memo: Memo) -> Memo:
    """As the next node reads it."""
    return Memo(memo.path, memo._taken_back)


def taken_back(memo: Memo) -> bool:
    fresh = again(memo)
    fresh.recall("cpu:0")
    return fresh.taken_back


def test_where_it_lies(tmp_path: Path) -> None:
    config = NodeConfig.model_validate({
        "device": "cpu:0",
        "page": str(tmp_path / "page"),
        "log_dir": str(tmp_path / "logs"),
        "rollout": {"model": "tiny-b"},
    })  # fmt: skip
    memo = Memo.of(config)
    memo.remember([], offered=False)
    assert memo.path == tmp_path / "page.json"
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["taken-back-cpu0"]


def test_an_engine_is_found_again_and_one_that_is_gone_is_not(memo: Memo, engine: Engine) -> None:
    memo.remember([engine, None], offered=True)
    found = again(memo).recall("cpu:0")
    assert [(e.role, e.url, e.pid) for e in found.values()] == [("rollout", engine.url, engine.pid)]
    content = json.loads(memo.path.read_text())
    content["engines"]["rollout"]["started"] += 1  # another process by now
    memo.path.write_text(json.dumps(content))
    assert again(memo).recall("cpu:0") == {}


def test_it_is_for_its_owner_only(memo: Memo) -> None:
    memo.remember([], offered=True)
    assert memo.path.stat().st_mode & 0o777 == 0o600


def test_that_it_was_taken_back_outlives_the_memo(memo: Memo) -> None:
    memo.remember([], offered=False)
    assert taken_back(memo)
    memo.forget()
    assert not memo.path.exists()
    assert taken_back(memo)
    memo.remember([], offered=True)
    assert not taken_back(memo)
    assert not memo._taken_back.exists()


def test_each_of_the_two_files_is_enough(memo: Memo) -> None:
    memo.remember([], offered=False)
    memo._taken_back.unlink()
    assert taken_back(memo)
    memo.remember([], offered=False)
    memo.path.unlink()
    assert taken_back(memo)


@pytest.mark.parametrize("content", ["", "nonsense", "[]", "{}", "17", '{"node": "x"}', "\udc80"])
def test_a_memo_that_cannot_be_read_says_nothing_but_the_other_file_does(
    memo: Memo, content: str
) -> None:
    memo.path.write_bytes(content.encode(errors="surrogateescape"))
    assert again(memo).recall("cpu:0") == {}
    assert not taken_back(memo)
    memo._taken_back.parent.mkdir()
    memo._taken_back.write_text("")  # as a disk that was full left it
    assert taken_back(memo)


def test_a_full_disk_is_told_once_and_tried_again(
    memo: Memo, disk_is_full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    memo.remember([], offered=True)
    before = memo.path.read_text()
    disk_is_full(True)
    for _ in range(5):
        memo.remember([], offered=False)
        assert memo.unwritten
    assert memo.path.read_text() == before
    assert 1 <= caplog.text.count("No space left on device") <= 2
    disk_is_full(False)
    memo.remember([], offered=False)
    assert not memo.unwritten
    assert taken_back(memo)
    assert [p.name for p in memo.path.parent.iterdir() if p.is_file()] == ["page.json"]


def test_on_a_full_disk_it_is_still_remembered_that_the_device_was_taken_back(
    memo: Memo, disk_is_full: Full
) -> None:
    memo.remember([], offered=True)
    disk_is_full(True)
    memo.remember([], offered=False)
    memo.path.unlink()  # a reboot, before the disk has room again
    assert taken_back(memo)
    memo.remember([], offered=True)
    assert not again(memo)._taken_back.exists()


def test_a_clean_stop_leaves_no_file_on_a_device_that_may_be_lent(memo: Memo) -> None:
    memo.remember([], offered=True)
    assert list(memo._taken_back.parent.iterdir())
    memo.forget()
    assert not list(memo._taken_back.parent.iterdir())


@pytest.mark.parametrize("which", ["memo", "mark"])
def test_one_place_that_cannot_be_written_does_not_keep_the_other_from_it(
    memo: Memo, which: str
) -> None:
    blocked = (
        memo.path.with_suffix(f".{os.getpid()}") if which == "memo" else memo._taken_back.parent
    )
    if which == "memo":
        blocked.mkdir()
    else:
        blocked.write_text("a file where a folder should be")
    memo.remember([], offered=False)
    assert memo.unwritten
    assert memo._taken_back.parent.is_dir() == (which == "memo")
    assert taken_back(memo)


def test_a_mark_that_cannot_be_renamed_is_tried_again(
    memo: Memo, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo.remember([], offered=False)
    rename = Path.replace

    def read_only(self: Path, target: Path) -> Path:
        if self == memo._taken_back:
            raise OSError(errno.EROFS, "Read-only file system")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", read_only)
        memo.remember([], offered=True)
        assert memo.unwritten
    memo.remember([], offered=True)
    assert not memo.unwritten
    assert not taken_back(memo)


def test_the_node_of_somebody_else_is_not_taken_over(
    memo: Memo, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo.remember([], offered=True)
    content = json.loads(memo.path.read_text()) | {"node": os.getpid() + 1}
    memo.path.write_text(json.dumps(content))
    monkeypatch.setattr(module, "_is_node", lambda _: True)
    with pytest.raises(ConfigError, match=rf"cpu:0 already has a node, pid {os.getpid() + 1}"):
        again(memo).recall("cpu:0")
    monkeypatch.setattr(module, "_is_node", lambda _: False)
    assert again(memo).recall("cpu:0") == {}
