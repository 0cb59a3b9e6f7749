"""`rose relay` and `rose weights serve` as processes: killed, over TLS, written to."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.transfer.test_cli import Trainer, rose
from tests.transfer.test_history import agree, got, weights, wire

from rose.transfer.publisher import Publisher
from rose.transfer.store import AUTHORITY, SECRET, StoreError, open_store
from rose.transfer.store.files import FileStore
from rose.transfer.subscriber import Subscriber

PATIENCE_S = 120.0
"""Only so that a test that would hang fails."""


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "store")


class Serving:
    """A `rose` process that serves; `url` is where."""

    def __init__(self, log: Path, *arguments: object) -> None:
        self._log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rose.cli", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        assert self.said.startswith("serving "), self.log
        self.url = self.said.split()[-1]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while line not in self.log:
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.05)

    def end(self, how: signal.Signals) -> int:
        alone = psutil.Process(self.process.pid).children() == []
        self.process.send_signal(how)
        code = self.process.wait(PATIENCE_S)
        assert alone and not psutil.pid_exists(self.process.pid)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(*arguments: object) -> Serving:
        started.append(Serving(tmp_path / f"log-{len(started)}", *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], Any]]:
    stores: list[Any] = []

    def connect(url: str, job: str = "job") -> Any:
        stores.append(open_store(url, job))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def test_a_relay_serves_is_killed_and_goes_on(
    trainer: Trainer, tmp_path: Path, start: Any, connect: Any
) -> None:
    trainer.publish()
    common = ("relay", trainer.url, "--job", "job", "--folder", tmp_path / "relay", "--listen")
    relay = start(*common, "127.0.0.1:0")
    assert relay.said.startswith(f"serving job of {trainer.url} on tcp://127.0.0.1:")
    host = Subscriber(connect(relay.url), tmp_path / "host")
    agree(host, trainer.publisher, trainer.values)
    relay.wait_for("version 0 arrived")
    trainer.publish()
    agree(host, trainer.publisher, trainer.values)
    relay.wait_for("version 1 arrived")
    with pytest.raises(StoreError, match="job other is not passed on"):
        connect(relay.url, "other").steps()
    assert relay.end(signal.SIGKILL) == -signal.SIGKILL
    trainer.publish()
    again = start(*common, relay.url.removeprefix("tcp://"))
    agree(host, trainer.publisher, trainer.values)
    again.wait_for("version 2 arrived")
    assert "version 1 arrived" not in again.log
    assert again.end(signal.SIGTERM) == 0
    assert "Traceback" not in again.log


def test_a_relay_follows_over_tls_before_anybody_asks(
    trainer: Trainer, tmp_path: Path, start: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl for a certificate")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
         "-keyout", key, "-out", certificate, "-subj", "/CN=rose",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv(SECRET, "between clusters")
    monkeypatch.setenv(AUTHORITY, str(certificate))
    trainer.publish()
    tls = ("--certificate", certificate, "--key", key)
    far = start("weights", "serve", trainer.folder, "--listen", "127.0.0.1:0", *tls)
    assert far.url.startswith("tls://127.0.0.1:")
    assert rose("weights", "verify", far.url, "--job", "job").exit_code == 0
    with pytest.raises(StoreError, match="there is no job other here"):
        connect(far.url, "other").steps()
    assert os.listdir(trainer.folder) == ["job"]
    folder = tmp_path / "relay"
    near = start("relay", far.url, "--job", "job", "--folder", folder, "--listen", "127.0.0.1:0")
    near.wait_for("version 0 arrived")
    trainer.publish()
    near.wait_for("version 1 arrived")
    agree(Subscriber(connect(near.url), tmp_path / "host"), trainer.publisher, trainer.values)
    assert near.end(signal.SIGINT) == 0
    assert far.end(signal.SIGTERM) == 0


def test_a_trainer_elsewhere_publishes_into_a_writable_folder(
    tmp_path: Path, start: Any, connect: Any
) -> None:
    (tmp_path / "store").mkdir()
    serving = start("weights", "serve", tmp_path / "store", "--listen", "127.0.0.1:0", "--writable")
    values = weights(random.Random(3))
    publisher = Publisher(connect(serving.url, "new"), threads=1)
    publisher.publish(values)
    publisher.settle()
    host = Subscriber(FileStore(tmp_path / "store", "new"), tmp_path / "host")
    assert host.update() == 0
    assert got(host) == wire(values)
    assert serving.end(signal.SIGINT) == 0
