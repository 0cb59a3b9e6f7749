"""Stores over real sockets: TCP, and a relay between two of them."""

from __future__ import annotations

import errno
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.test_history import agree, got, nudge, weights

from rose.transfer import relay as relaying
from rose.transfer.errors import TransferError
from rose.transfer.manifest import Manifest, Step
from rose.transfer.publisher import Publisher
from rose.transfer.relay import Relay
from rose.transfer.store import server as serving
from rose.transfer.store import tcp
from rose.transfer.store.base import Store, StoreError
from rose.transfer.store.files import FileStore
from rose.transfer.store.server import Server
from rose.transfer.store.tcp import TcpStore
from rose.transfer.subscriber import Subscriber

SECRET = "of a sort"


class Clusters:
    """A trainer that publishes into files, its server, and a relay with a server elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rng = random.Random(5)
        self.values = weights(self.rng)
        self.files = FileStore(folder / "store", "job")
        self.publisher = Publisher(self.files, threads=2)
        self.open: list[Any] = []
        self.server = self.serve(self.files)

    def publish(self) -> None:
        nudge(self.rng, self.values)
        self.values["embed"][0, 0] += 1.0
        self.publisher.publish(self.values)
        self.publisher.settle()

    def serve(self, store: Any, **more: Any) -> Server:
        def of(job: str) -> Any:
            if job != "job":
                raise StoreError(f"there is no job {job}")
            return store

        server = Server(of, secret=SECRET, **more)
        self.open.append(server)
        return server

    def client(self, server: Server, **more: Any) -> TcpStore:
        store = TcpStore(server.address, "job", **({"secret": SECRET, "patience_s": 1.0} | more))
        self.open.append(store)
        return store

    def relay(self) -> Relay:
        return Relay(self.client(self.server), self.folder / "relay")

    def host(self, store: Store, name: str = "host") -> Subscriber:
        return Subscriber(store, self.folder / name)

    def agree(self, host: Subscriber) -> None:
        agree(host, self.publisher, self.values)

    def close(self) -> None:
        for one in reversed(self.open):
            one.close()


def has_sent(server: Server, count: int) -> None:
    """A server counts bytes after it has sent them: a client may have them before."""
    deadline = time.monotonic() + 20.0
    while server.sent != count:
        assert time.monotonic() < deadline, f"{server.sent} bytes instead of {count}"
        time.sleep(0.01)


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clusters]:
    monkeypatch.setattr(relaying, "FRESH_S", 0.0)
    made = Clusters(tmp_path)
    yield made
    made.close()


def test_a_host_follows_over_tcp(clusters: Clusters) -> None:
    host = clusters.host(clusters.client(clusters.server))
    for _ in range(6):
        clusters.publish()
        clusters.agree(host)


def test_a_trainer_publishes_over_tcp(clusters: Clusters) -> None:
    clusters.files.close()
    remote = clusters.client(clusters.serve(clusters.files, writable=True))
    clusters.publisher = Publisher(remote, threads=2)
    host = clusters.host(clusters.files)
    for _ in range(6):
        clusters.publish()
        clusters.agree(host)


def test_large_reads_use_several_connections_and_are_exact(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "RANGE", 100)
    clusters.publish()
    store = clusters.client(clusters.server)
    (manifest,) = store.manifests(Step(None, 0))
    size = manifest.buckets[0].size
    there = clusters.files.read(Step(None, 0), 0, 0, 0, size)
    assert store.read(Step(None, 0), 0, 0, 0, size) == there
    assert store.read(Step(None, 0), 0, 0, 7, 0) == b""


def test_every_byte_crosses_the_wan_once_for_eight_hosts(clusters: Clusters) -> None:
    near = clusters.serve(clusters.relay())
    hosts = [clusters.host(clusters.client(near), f"host-{i}") for i in range(8)]
    for _ in range(3):
        clusters.publish()
        threads = [threading.Thread(target=host.update) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for host in hosts:
            clusters.agree(host)
    published = sum(clusters.files.steps().values())
    has_sent(clusters.server, published)
    has_sent(near, 8 * published)


def test_a_relay_serves_from_its_disk_when_the_trainer_is_gone(clusters: Clusters) -> None:
    clusters.publish()
    relay = clusters.relay()
    clusters.agree(clusters.host(relay, "first"))
    clusters.server.close()
    clusters.agree(clusters.host(relay, "second"))


def test_a_relay_whose_upstream_is_gone_answers_before_subscribers_give_up(
    clusters: Clusters,
) -> None:
    clusters.publish()
    relay = Relay(clusters.client(clusters.server, patience_s=60.0), clusters.folder / "relay")
    near = clusters.serve(relay)
    clusters.agree(clusters.host(clusters.client(near, patience_s=10.0), "first"))
    until_whole(relay)
    clusters.server.close()
    clusters.agree(clusters.host(clusters.client(near, patience_s=10.0), "second"))


def test_a_closed_store_insists_no_longer(clusters: Clusters) -> None:
    clusters.publish()
    store = clusters.client(clusters.server, patience_s=600.0)
    clusters.server.close()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(store.steps)
        store.close()
        with pytest.raises(StoreError, match=r"refused|closed"):
            asking.result()


def until_whole(relay: Relay) -> None:
    deadline = time.monotonic() + 20.0
    while relay._arriving:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_steps_that_arrive_at_once_are_all_sealed(clusters: Clusters) -> None:
    """Their threads meet at the claim of the folder."""
    for _ in range(5):
        clusters.publish()
    for attempt in range(5):
        relay = Relay(clusters.client(clusters.server), clusters.folder / f"relay-{attempt}")
        for step in clusters.files.steps():
            relay._fetch(step)
        until_whole(relay)
        assert relay._local.steps() == clusters.files.steps()


def test_a_relay_that_was_killed_goes_on_from_its_disk(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters.publish()
    monkeypatch.setattr(relaying, "PIECE", 512)
    upstream = clusters.client(clusters.server)
    real, count = upstream.read, 0

    def die(*args: Any) -> bytes:
        nonlocal count
        count += 1
        if count >= 4:
            raise StoreError("killed")
        return real(*args)

    monkeypatch.setattr(upstream, "read", die)
    relay = Relay(upstream, clusters.folder / "relay")
    with pytest.raises(StoreError, match="version 0 did not arrive: killed"):
        clusters.host(relay, "first").update()
    assert relay._local.steps() == {}
    has_sent(clusters.server, 3 * 512)
    relay._local.close()
    again = clusters.relay()
    clusters.agree(clusters.host(again, "second"))
    (manifest,) = clusters.files.manifests(Step(None, 0))
    has_sent(clusters.server, manifest.stored)


def test_a_relay_with_a_full_disk_says_so_and_recovers(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters.publish()
    relay = clusters.relay()
    host = clusters.host(relay)
    clusters.agree(host)
    clusters.publish()

    def full(*_: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(relay._local, "draft", full)
    with pytest.raises(StoreError, match="No space left"):
        host.update()
    assert host.version == 0
    monkeypatch.undo()
    clusters.agree(host)


@pytest.mark.parametrize("last", [Step(0, 1), Step(None, 0)])
def test_a_relay_keeps_to_its_allowance(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, last: Step
) -> None:
    """The newest version stays, also when an older one is the last to be sealed."""
    clusters.publish()
    clusters.publish()
    relay = Relay(clusters.client(clusters.server), clusters.folder / "relay", most_bytes=1)
    seal, other_sealed = relay._local.seal, threading.Event()

    def in_order(manifest: Manifest) -> None:
        if manifest.step == last:
            assert other_sealed.wait(20.0)
        seal(manifest)
        other_sealed.set()

    monkeypatch.setattr(relay._local, "seal", in_order)
    clusters.agree(clusters.host(relay))
    until_whole(relay)
    assert list(relay._local.steps()) == [Step(0, 1)]


def flipped(whole: bytes) -> bytes:
    return whole[:-1] + bytes([whole[-1] ^ 1])


def truncated(whole: bytes) -> bytes:
    return whole[:-7]


@pytest.mark.parametrize("damage", [flipped, truncated])
@pytest.mark.parametrize("through_relay", [False, True], ids=["direct", "relay"])
def test_a_damaged_bucket_is_refused_and_fetched_again(
    clusters: Clusters, damage: Callable[[bytes], bytes], through_relay: bool
) -> None:
    clusters.publish()
    store = clusters.relay() if through_relay else clusters.client(clusters.server)
    host = clusters.host(store)
    clusters.agree(host)
    clusters.publish()
    before = got(host)
    (bucket,) = clusters.folder.glob("store/job/0000000001-*/rank-0/bucket-0")
    whole = bucket.read_bytes()
    bucket.write_bytes(damage(whole))
    time.sleep(2 * relaying.FRESH_S)  # a relay's list of versions may be a moment old
    with pytest.raises((StoreError, TransferError), match=r"checksum|has no byte|decompressed"):
        host.update()
    assert host.version == 0
    assert got(host) == before
    bucket.write_bytes(whole)
    clusters.agree(host)


def test_a_server_that_comes_back_is_found_again(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters.publish()
    store = clusters.client(clusters.server, patience_s=20.0)
    assert store.steps()
    address = clusters.server.address
    clusters.server.close()
    back: list[Server] = []
    timer = threading.Timer(
        0.5, lambda: back.append(Server(lambda job: clusters.files, address, secret=SECRET))
    )
    timer.start()
    assert store.steps() == clusters.files.steps()
    timer.join()
    clusters.open += back


# ---- strangers


def test_a_wrong_secret_is_refused_on_both_sides(clusters: Clusters) -> None:
    with pytest.raises(StoreError, match="wrong secret"):
        clusters.client(clusters.server, secret="guess").steps()
    assert clusters.client(clusters.server).steps() == {}


def test_listening_elsewhere_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="needs a secret"):
        Server(lambda job: None, ("0.0.0.0", 0))  # type: ignore[arg-type,return-value]


def test_who_may_only_read_cannot_write(clusters: Clusters) -> None:
    clusters.publish()
    store = clusters.client(clusters.server)
    with pytest.raises(StoreError, match="not allowed"):
        store.remove(Step(None, 0))
    with pytest.raises(StoreError):
        store.write(Step(0, 1), 0, 0, b"x")
    assert list(clusters.files.steps()) == [Step(None, 0)]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda s: s.read(Step(None, 0), 0, 0, 0, 1 << 20), "has no byte"),
        (lambda s: s.read(Step(None, 0), 0, 9, 0, 1), "bucket-9"),
        (lambda s: s.read(Step(None, 0), -1, 0, 0, 1), "negative"),
        (lambda s: s.read(Step(None, 0), 0, -1, 0, 1), "negative"),
        (lambda s: s.read(Step(None, 0), 0, 0, -5, 5), "negative"),
        (lambda s: s.read(Step(5, 9), 0, 0, 0, 1), "bucket-0"),
        (lambda s: s.manifests(Step(5, 9)), "manifest"),
    ],
)
def test_what_there_is_not_is_said(
    clusters: Clusters, ask: Callable[[Store], Any], said: str
) -> None:
    clusters.publish()
    with pytest.raises(StoreError, match=said):
        ask(clusters.client(clusters.server))


def test_other_jobs_and_paths_are_refused(clusters: Clusters) -> None:
    store = clusters.client(clusters.server)
    for bad in ("other", "../job", "/etc"):
        store.job = bad
        with pytest.raises(StoreError, match="job"):
            store.steps()


def test_an_absurd_length_ends_the_connection_and_nothing_else(clusters: Clusters) -> None:
    with socket.create_connection(clusters.server.address, 5.0) as stranger:
        stranger.sendall(struct.pack("<I", 2**32 - 1))
        while stranger.recv(4096):
            pass
    assert clusters.client(clusters.server).steps() == {}


def test_a_stranger_who_says_nothing_is_not_waited_for(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "GREETING_S", 0.1)
    with socket.create_connection(clusters.server.address, 60.0) as stranger:
        while stranger.recv(4096):
            pass
    assert clusters.client(clusters.server).steps() == {}


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_noise_never_stops_the_server(noise_server: Server, noise: list[bytes]) -> None:
    with (
        socket.create_connection(noise_server.address, 5.0) as stranger,
        suppress(OSError),
    ):
        for piece in noise:
            stranger.sendall(struct.pack("<I", len(piece)) + piece)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass


@pytest.fixture(scope="module")
def noise_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = FileStore(tmp_path_factory.mktemp("noise"), "job")
    server = Server(lambda job: store)
    yield server
    client = TcpStore(server.address, "job")
    assert client.steps() == {}
    client.close()
    server.close()
