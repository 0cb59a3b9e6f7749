"""`rose relay` and `rose weights ...`: real stores, real processes, real sockets."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.transfer.test_history import weights
from typer.testing import CliRunner

from rose.claims import claim
from rose.cli import app
from rose.transfer import inspect
from rose.transfer.manifest import Step
from rose.transfer.publisher import Publisher
from rose.transfer.store import SECRET
from rose.transfer.store.files import FileStore

PATIENCE_S = 120.0
"""Only so that a test that would hang fails."""
CHANGED = 5


def rose(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def refused(*arguments: object) -> str:
    """The one sentence that a wrong use gets."""
    result = rose(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("rose: ")
    return str(sentence)


class Trainer:
    """Publishes into files; every version changes `CHANGED` other elements."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}"
        self.values = weights(random.Random(3))
        self.store = FileStore(folder, "job")
        self.publisher = Publisher(self.store, anchor_every=4, threads=2)

    def publish(self, versions: int = 1) -> None:
        for _ in range(versions):
            if (last := self.publisher.version) is not None:
                self.values["embed"][last, :CHANGED] += 1.0
            self.publisher.publish(self.values)
            self.publisher.settle()

    def bucket(self, step: Step) -> Path:
        base = "nothing" if step.base is None else f"{step.base:010d}"
        return self.folder / f"job/{step.version:010d}-from-{base}/rank-0/bucket-0"

    def pretend(self, one: Step, to_be: Step) -> None:
        """Put the contents of a step, checksums and all, in the place of another."""
        (manifest,) = self.store.manifests(one)
        data = self.bucket(one).read_bytes()
        self.store.remove(to_be)
        self.store.write(to_be, 0, 0, data)
        self.store.seal(replace(manifest, base=to_be.base, version=to_be.version))


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "store")


@pytest.fixture
def six(trainer: Trainer) -> Trainer:
    trainer.publish(6)
    return trainer


STEPS = [(None, 0), (0, 1), (1, 2), (2, 3), (None, 4), (0, 4), (3, 4), (4, 5)]


# ---- looking


def test_ls_tells_all_steps(six: Trainer) -> None:
    result = rose("weights", "ls", six.url, "--job", "job", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(one["base"], one["version"]) for one in told["steps"]] == STEPS
    assert {Step(s["base"], s["version"]): s["bytes"] for s in told["steps"]} == six.store.steps()
    by_step = {(one["base"], one["version"]): one for one in told["steps"]}
    assert by_step[4, 5]["changed"] == CHANGED
    assert by_step[0, 4]["changed"] == 4 * CHANGED
    assert by_step[4, 5]["density"] == CHANGED / by_step[4, 5]["elements"]
    assert told["newest"] == 5
    shown = rose("weights", "ls", six.url, "--job", "job").stdout
    assert shown.count("anchor") == 2
    total = sum(six.store.steps().values())
    assert shown.splitlines()[-1] == f"8 steps, {total:,} bytes, newest version 5"


def test_ls_without_an_anchor_reaches_nothing(six: Trainer) -> None:
    for step in list(six.store.steps()):
        if step.base is None:
            six.store.remove(step)
    shown = rose("weights", "ls", six.url, "--job", "job").stdout
    assert shown.splitlines()[-1].endswith("no version can be reached")


def test_show_tells_what_a_version_changed(six: Trainer) -> None:
    result = rose("weights", "show", six.url, "--job", "job", 4, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["base"], told["version"]) == (3, 4)
    names = [one["name"] for one in told["tensors"]]
    assert names == sorted(six.values)
    by_name = {one["name"]: one for one in told["tensors"]}
    assert by_name["embed"]["changed"] == CHANGED
    assert by_name["embed"]["shape"] == [70, 33]
    assert by_name["embed"]["density"] == CHANGED / (70 * 33)
    assert by_name["embed"]["bytes"] == told["bytes"] == six.store.steps()[Step(3, 4)]
    assert by_name["steps"] | {"changed": 0, "bytes": 0} == by_name["steps"]
    newest = rose("weights", "show", six.url, "--job", "job")
    assert "version 5 (from 4)" in newest.stdout.splitlines()[-1]


def test_two_ranks_are_one_version(tmp_path: Path) -> None:
    store = FileStore(tmp_path, "job")
    values = weights(random.Random(3))
    parts = [{"embed": values.pop("embed")}, values]
    publishers = [Publisher(store, rank=rank, ranks=2, threads=1) for rank in range(2)]
    for _ in range(3):
        for publisher, part in zip(publishers, parts, strict=True):
            next(iter(part.values())).view(-1)[0] += 1.0
            publisher.publish(part)
    url = f"file://{tmp_path}"
    told = json.loads(rose("weights", "ls", url, "--job", "job", "--json").stdout)
    assert [one["ranks"] for one in told["steps"]] == [2, 2, 2]
    tensors = json.loads(rose("weights", "show", url, "--job", "job", "--json").stdout)["tensors"]
    assert {one["name"]: one["changed"] for one in tensors if one["changed"]} == {
        "embed": 1,
        "norm": 1,
    }
    verified = rose("weights", "verify", url, "--job", "job")
    assert verified.exit_code == 0, verified.output


# ---- verifying


def test_verify_is_content_with_what_was_published(six: Trainer) -> None:
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 0, result.output
    total = sum(six.store.steps().values())
    assert result.stdout == f"8 steps, {total:,} bytes, all good\n"


def test_verify_names_everything_that_is_damaged(six: Trainer) -> None:
    flipped = six.bucket(Step(1, 2))
    whole = flipped.read_bytes()
    flipped.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    torn = six.bucket(Step(2, 3))
    torn.write_bytes(torn.read_bytes()[:-1])
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 1, result.output
    checksum, frame, truncated = result.stdout.splitlines()
    assert checksum == "version 2 (from 1), rank 0, bucket 0: wrong checksum"
    assert frame == ("version 2 (from 1), rank 0, embed, frame 0: wrong checksum after the update")
    assert truncated.startswith("version 3 (from 2), rank 0, bucket 0: ")
    assert "truncated" in truncated


def test_verify_reads_on_past_a_damaged_anchor(six: Trainer) -> None:
    for step in (Step(None, 0), Step(4, 5)):
        six.bucket(step).unlink()
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 1, result.output
    assert [line.split(", rank")[0] for line in result.stdout.splitlines()] == [
        "version 0 (anchor)",
        "version 5 (from 4)",
    ]


def test_verify_tries_every_step_on_its_own_base(six: Trainer) -> None:
    """Values and checksums of the merged step are right, but it lacks what changed before."""
    six.pretend(Step(3, 4), to_be=Step(0, 4))
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 1, result.output
    assert result.stdout == (
        "version 4 (from 0), rank 0, embed, frame 0: wrong checksum after the update\n"
    )


def test_verify_compares_an_anchor_with_what_leads_to_it(six: Trainer) -> None:
    six.pretend(Step(None, 0), to_be=Step(None, 4))
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 1, result.output
    assert result.stdout == "version 4 (anchor), embed: not what the steps before lead to\n"


def test_verify_says_what_it_could_not_apply(six: Trainer) -> None:
    six.store.remove(Step(None, 0))
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 0, result.output
    good, rest = result.stdout.splitlines()
    assert good.startswith("7 steps, ")
    assert rest.startswith("5 of them not applied")


def test_verify_finds_a_bad_frame_without_its_base(six: Trainer) -> None:
    six.store.remove(Step(None, 0))
    path = six.bucket(Step(1, 2))
    whole = path.read_bytes()
    path.write_bytes(b"none" + whole[4:])
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 1, result.output
    assert "version 2 (from 1), rank 0, embed, frame 0: not a frame" in result.stdout


def test_a_step_that_is_removed_meanwhile_is_not_damaged(
    six: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = inspect.Verification._deltas

    def tidied(self: Any, version: int) -> Iterator[str]:
        six.store.remove(Step(1, 2))
        return real(self, version)

    monkeypatch.setattr(inspect.Verification, "_deltas", tidied)
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 0, result.output


def test_an_interruption_is_a_sentence_and_leaves_nothing(
    six: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(room))
    monkeypatch.setattr(inspect.Verification, "_deltas", interrupted)
    result = rose("weights", "verify", six.url, "--job", "job")
    assert result.exit_code == 130
    assert result.stderr == "rose: stopped before the end\n"
    assert list(room.iterdir()) == []


# ---- what users get wrong


def test_stores_that_are_none(six: Trainer, tmp_path: Path) -> None:
    for command in ("ls", "show", "verify"):
        assert "s3://there" in refused("weights", command, "s3://there", "--job", "job")
        missing = f"file://{tmp_path}/missing"
        assert f"{tmp_path}/missing" in refused("weights", command, missing, "--job", "job")
        assert "other" in refused("weights", command, six.url, "--job", "other")
    assert "tcp://host:" in refused("weights", "ls", "tcp://host:", "--job", "job")
    assert "../x" in refused("relay", six.url, "--job", "../x", "--folder", tmp_path / "relay")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["store"]
    assert sorted(one.name for one in six.folder.iterdir()) == ["job"]


def test_versions_that_are_not_there(six: Trainer, tmp_path: Path) -> None:
    sentence = refused("weights", "show", six.url, "--job", "job", 99)
    assert sentence == "rose: VERSION 99 is not there: 0 to 5 are"
    FileStore(tmp_path, "empty")
    empty = refused("weights", "show", f"file://{tmp_path}", "--job", "empty")
    assert empty == "rose: job empty has no version yet"


def test_a_damaged_frame_that_is_to_be_shown(six: Trainer) -> None:
    path = six.bucket(Step(4, 5))
    path.write_bytes(b"none" + path.read_bytes()[4:])
    said = refused("weights", "show", six.url, "--job", "job")
    assert "version 5 (from 4), rank 0, embed, frame 0: not a frame" in said


def test_addresses_that_cannot_be_served(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for listen, said in (
            (f"127.0.0.1:{port}", "in use"),
            ("127.0.0.1", "not HOST:PORT"),
            (":7400", "not HOST:PORT"),
            ("127.0.0.1:99999", "not HOST:PORT"),
            ("0.0.0.0:0", SECRET),
        ):
            where = ("--folder", tmp_path / "relay", "--listen", listen)
            relay = refused("relay", trainer.url, "--job", "job", *where)
            serve = refused("weights", "serve", trainer.folder, "--listen", listen)
            for sentence in (relay, serve):
                assert f"--listen {listen}" in sentence.replace("'", "") and said in sentence


def test_other_bad_options_of_servers(trainer: Trainer, tmp_path: Path) -> None:
    def relay(*more: object, folder: Path = tmp_path / "relay") -> str:
        return refused("relay", trainer.url, "--job", "job", "--folder", folder, *more)

    file = tmp_path / "file"
    file.touch()
    for most in ("0", "-1", "nan", "inf"):
        assert "--most-gb" in relay("--most-gb", most)
    with claim(tmp_path / "relay.lock"):
        assert "is another relay's" in relay(folder=tmp_path)
    assert f"--folder {file}" in relay(folder=file)
    assert "--key" in relay("--certificate", file)
    assert f"--certificate {file}" in relay("--certificate", file, "--key", file)
    missing = tmp_path / "missing"
    assert f"--key {missing}" in relay("--certificate", file, "--key", missing)
    assert f"FOLDER {missing}" in refused("weights", "serve", missing)


def test_the_command_line_starts_without_torch_and_numba() -> None:
    code = "import sys, rose.cli; sys.exit(' '.join({'torch', 'numba'} & set(sys.modules)) or 0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
