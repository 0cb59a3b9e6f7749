"""Processes that are killed, clocks that jump, links that are listened to: over real sockets."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.transfer.test_history import agree, got, nudge, weights, wire

from rose.transfer.errors import TransferError
from rose.transfer.manifest import Step
from rose.transfer.publisher import Publisher
from rose.transfer.store import AUTHORITY, SECRET, open_store
from rose.transfer.store.base import StoreError
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Pace, Server
from rose.transfer.store.tcp import TcpStore
from rose.transfer.subscriber import Subscriber

PATIENCE_S = 60.0


@contextmanager
def process(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """Another Python that runs a script; dead at the end, whatever happened."""
    words = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        assert running.stdout is not None
        running.stdout.close()


def until(true: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Trainer:
    """Publishes into files that a server offers."""

    def __init__(self, folder: Path, **server: Any) -> None:
        self.rng = random.Random(3)
        self.values = weights(self.rng)
        self.files = FileStore(folder / "store", "job")
        self.server = Server(lambda job: self.files, **server)
        self.publisher = Publisher(self.files, threads=1)

    @property
    def port(self) -> int:
        return self.server.address[1]

    def publish(self) -> None:
        nudge(self.rng, self.values)
        self.values["embed"] += 1.0
        self.values["up"] += 1.0
        self.publisher.publish(self.values)
        self.publisher.settle()

    def agree(self, host: Subscriber) -> None:
        agree(host, self.publisher, self.values)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.server.close()


SUBSCRIBE = """
    import os, signal, sys
    from pathlib import Path
    from rose.transfer.copy import Copy
    from rose.transfer.store.tcp import TcpStore
    from rose.transfer.subscriber import Subscriber

    port, folder, dies_at = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    real, count = Copy.apply, 0

    def apply(*args):
        global count
        real(*args)
        count += 1
        if count == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    Copy.apply = apply
    Subscriber(TcpStore(("127.0.0.1", port), "job"), folder).update()
"""


def test_a_subscriber_killed_during_the_fetch(trainer: Trainer, tmp_path: Path) -> None:
    trainer.publish()
    host = Subscriber(TcpStore(trainer.server.address, "job"), tmp_path / "host")
    trainer.agree(host)
    before = got(host)
    trainer.publish()
    slow = Server(lambda job: trainer.files, pace=Pace(1000.0))
    with process(SUBSCRIBE, slow.address[1], tmp_path / "host", 0) as other:
        until(lambda: slow._pace is not None and slow._pace._free_at > 0)
        other.send_signal(signal.SIGKILL)
        other.wait()
    slow.close()
    with host.reading():
        assert (host.version, got(host)) == (0, before)
    trainer.agree(host)


def test_a_subscriber_killed_during_the_commit(trainer: Trainer, tmp_path: Path) -> None:
    trainer.publish()
    host = Subscriber(TcpStore(trainer.server.address, "job"), tmp_path / "host")
    trainer.agree(host)
    trainer.publish()
    with process(SUBSCRIBE, trainer.port, tmp_path / "host", 2) as other:
        assert other.wait(PATIENCE_S) == -signal.SIGKILL
    with pytest.raises(TransferError, match="no whole version"), host.reading():
        pass
    trainer.agree(host)


PUBLISH = """
    import os, signal, sys
    import torch
    from rose.transfer import publisher
    from rose.transfer.store.tcp import TcpStore

    store = TcpStore(("127.0.0.1", int(sys.argv[1])), "job")
    publisher.BUCKET = 1000
    real = store.write

    def write(step, rank, bucket, data):
        if bucket == 1:
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        real(step, rank, bucket, data)

    store.write = write
    made = publisher.Publisher(store, threads=1)
    made.publish({name: torch.randn(70, 33) for name in ("embed", "up")})
"""


def test_a_publisher_killed_between_buckets(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", "job")
    server = Server(lambda job: files, writable=True)
    with process(PUBLISH, server.address[1]) as other:
        assert other.wait(PATIENCE_S) == -signal.SIGKILL
        assert other.stdout is not None and other.stdout.read() == "killed\n"
    assert files.steps() == {}
    store = TcpStore(server.address, "job")
    values = weights(random.Random(1))
    until(lambda: _publishes(store, values))
    host = Subscriber(store, tmp_path / "host")
    assert host.update() == 0
    assert got(host) == wire(values)
    store.close()
    server.close()


def _publishes(store: TcpStore, values: Any) -> bool:
    """False while the server has not noticed that the publisher before is gone."""
    try:
        publisher = Publisher(store, threads=1)
        publisher.publish(values)
        publisher.settle()
    except StoreError as error:
        if "already has a publisher" in str(error):
            return False
        raise
    return True


def test_two_publishers_over_tcp(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "store", "job")
    server = Server(lambda job: files, writable=True)
    first, second = (TcpStore(server.address, "job") for _ in range(2))
    values = weights(random.Random(1))
    one, other = Publisher(first, threads=1), Publisher(second, threads=1)
    one.publish(values)
    with pytest.raises(StoreError, match="job job already has a publisher of rank 0"):
        other.publish(values)
    one.publish(values)
    one.settle()
    first.close()
    until(lambda: _publishes(second, values))
    assert list(files.steps()) == [Step(None, 0), Step(0, 1), Step(1, 2)]
    second.close()
    server.close()


RELAY = """
    import sys, time
    from pathlib import Path
    from rose.transfer.relay import Relay
    from rose.transfer.store.server import Pace, Server
    from rose.transfer.store.tcp import TcpStore

    upstream, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    relay = Relay(TcpStore(("127.0.0.1", upstream), "job"), folder)
    server = Server(lambda job: relay, ("127.0.0.1", port), pace=Pace(float(sys.argv[4])))
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if server.sent:
            print("sent", flush=True)
            time.sleep(1000)
"""


def test_a_relay_killed_while_serving(trainer: Trainer, tmp_path: Path) -> None:
    trainer.publish()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TcpStore(("127.0.0.1", port), "job", patience_s=PATIENCE_S)
    updating = threading.Thread(target=lambda: Subscriber(store, tmp_path / "host").update())
    with process(RELAY, trainer.port, port, tmp_path / "relay", 4000.0) as relay:
        assert relay.stdout is not None and relay.stdout.readline() == "ready\n"
        updating.start()
        assert relay.stdout.readline() == "sent\n"
    with process(RELAY, trainer.port, port, tmp_path / "relay", 1e9) as relay:
        updating.join(PATIENCE_S)
        assert not updating.is_alive()
        trainer.agree(Subscriber(store, tmp_path / "host"))
    store.close()


def test_clocks_may_jump(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ordered or timed by the time of day, nor by what files say of it."""
    rng = random.Random(8)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(-1e9, 4e9))
    host = Subscriber(TcpStore(trainer.server.address, "job"), tmp_path / "host")
    for _ in range(8):
        trainer.publish()
        for path in (tmp_path / "store").rglob("*"):
            stamp = rng.uniform(0, 4e9)
            os.utime(path, (stamp, stamp))
        trainer.agree(host)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "cert.pem"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_over_tls(tmp_path: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, tmp_path / "key.pem")
    trainer = Trainer(tmp_path, tls=context, secret="hush")
    trainer.publish()
    monkeypatch.setenv(SECRET, "hush")
    monkeypatch.setenv(AUTHORITY, str(certificate))
    store = open_store(f"tls://localhost:{trainer.port}", "job")
    trainer.agree(Subscriber(store, tmp_path / "host"))
    monkeypatch.delenv(AUTHORITY)
    stranger = open_store(f"tls://localhost:{trainer.port}", "job")
    monkeypatch.setattr(stranger, "_patience_s", 0.1)
    with pytest.raises(StoreError, match="certificate"):
        stranger.steps()
    plain = TcpStore(trainer.server.address, "job", secret="hush", patience_s=0.1)
    with pytest.raises(StoreError):
        plain.steps()
    trainer.server.close()


@pytest.mark.parametrize(
    "url",
    ["", "/folder", "file:", "file://host/folder", "tcp://", "tcp://host", "tcp://host:port",
     "tcp://:7", "tcp://host:99999", "tcp://host:7/path", "http://host:7"],
)  # fmt: skip
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ValueError, match="store"):
        open_store(url, "job")
