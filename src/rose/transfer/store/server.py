"""Serves stores to `tcp.TcpStore`: a thread per connection, files straight from the kernel.

The only service of rose that another cluster talks to, so it believes nothing: no message before
the secret is shown, no length over its limit, no name that leaves a folder.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rose.net import is_loopback
from rose.transfer import manifest as manifests
from rose.transfer.manifest import Manifest, ManifestError, Step, check_job
from rose.transfer.store import wire
from rose.transfer.store.base import Store, StoreError
from rose.transfer.store.wire import Answer, Request

log = logging.getLogger("rose.transfer")

SLICE = 256 << 10
"""Bytes sent at a time on a link that is held back."""
GREETING_S = 10.0
"""A stranger must show the secret within this time."""
SILENT_S = 300.0
"""A client that says nothing for so long is gone."""
MOST_BUCKET = 1 << 30


class Served(Store, Protocol):
    def file(self, step: Step, rank: int, bucket: int, end: int) -> Path:
        """Where a bucket is; its bytes up to `end` are there. `StoreError` if they never will."""


class Pace:
    """A token bucket: bytes per second over all connections, to try slow links."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self.bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - now))


class Writers:
    """One publisher per job and rank, as long as it has a connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[tuple[str, int], tuple[str, set[int]]] = {}

    def claim(self, request: Request, connection: int) -> None:
        key = (request.job, request.rank)
        with self._lock:
            writer, connections = self._holders.get(key, ("", set()))
            if connections and writer != request.writer:
                raise StoreError(f"job {key[0]} already has a publisher of rank {key[1]}")
            self._holders[key] = (request.writer, {*connections, connection})

    def left(self, connection: int) -> None:
        with self._lock:
            for _, connections in self._holders.values():
                connections.discard(connection)


class Server:
    """`stores` finds the store of a job; `StoreError` for one that there is not."""

    def __init__(
        self,
        stores: Callable[[str], Served],
        address: tuple[str, int] = ("127.0.0.1", 0),
        *,
        secret: str = "",
        tls: ssl.SSLContext | None = None,
        writable: bool = False,
        pace: Pace | None = None,
    ) -> None:
        if not is_loopback(address[0]) and not secret:
            raise ValueError(f"listening on {address[0]} needs a secret")
        self._stores = stores
        self._secret = secret
        self._tls = tls
        self._writable = writable
        self._pace = pace
        self.sent = 0
        """Bytes of buckets sent."""
        self._writers = Writers()
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="rose-accept", daemon=True).start()

    def close(self) -> None:
        _hang_up(self._listener)
        self._listener.close()
        with self._lock:
            clients, self._clients = self._clients, set()
        for client in clients:
            _hang_up(client)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=self._attend, args=(client,), daemon=True).start()

    def _attend(self, client: socket.socket) -> None:
        peer = client
        try:
            client.settimeout(GREETING_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                peer = self._tls.wrap_socket(client, server_side=True)
            wire.greet_client(peer, self._secret)
            peer.settimeout(SILENT_S)
            while True:
                self._answer(peer, wire.receive(peer, Request))
        except (OSError, StoreError) as error:
            log.info("a client is gone: %s", error)
        finally:
            self._writers.left(id(peer))
            with self._lock:
                self._clients.discard(client)
            peer.close()

    def _answer(self, peer: socket.socket, request: Request) -> None:
        data = b""
        if request.call == "write":  # what follows must be taken, also if it is refused then
            if not self._writable or not 0 <= request.length <= MOST_BUCKET:
                raise StoreError(f"a client that writes {request.length} bytes")
            data = bytes(wire.receive_exactly(peer, request.length))
        try:
            answer, path = self._look_up(request, data, id(peer))
        except (StoreError, ManifestError, ValueError) as error:
            wire.send(peer, Answer(error=str(error)))
            return
        wire.send(peer, answer)
        if path is not None:
            self._send(peer, path, request.offset, request.length)

    def _look_up(
        self, request: Request, data: bytes, connection: int
    ) -> tuple[Answer, Path | None]:
        store = self._stores(check_job(request.job))
        step = request.step
        if min(request.rank, request.bucket, request.offset, request.length) < 0:
            raise StoreError("a negative number in a request")
        match request.call:
            case "steps":
                steps = [(*one, size) for one, size in store.steps(request.after).items()]
                return Answer(steps=steps), None
            case "manifests":
                found = [manifests.encode(one) for one in store.manifests(step)]
                return Answer(manifests=found), None
            case "read":
                end = request.offset + request.length
                path = store.file(step, request.rank, request.bucket, end)
                return Answer(length=request.length), path
        if not self._writable:
            raise StoreError(f"{request.call} is not allowed here")
        self._writers.claim(request, connection)
        match request.call:
            case "write":
                store.write(step, request.rank, request.bucket, data)
            case "seal":
                store.seal(_of(manifests.decode(request.manifest), request))
            case "remove":
                store.remove(step)
            case _:
                raise StoreError(f"unknown call {request.call!r}")
        return Answer(), None

    def _send(self, peer: socket.socket, path: Path, offset: int, length: int) -> None:
        with path.open("rb") as file:
            slice_ = length if self._pace is None else SLICE
            for begin in range(offset, offset + length, max(1, slice_)):
                count = min(slice_, offset + length - begin)
                if self._pace is not None:
                    self._pace.wait(count)
                if peer.sendfile(file, begin, count) != count:
                    raise StoreError(f"{path} is truncated")
                self.sent += count


def _of(manifest: Manifest, request: Request) -> Manifest:
    if (manifest.job, manifest.step, manifest.rank) != (request.job, request.step, request.rank):
        raise StoreError(f"a manifest of version {manifest.version} of job {manifest.job}")
    return manifest


def _hang_up(peer: socket.socket) -> None:
    with suppress(OSError):  # gone already
        peer.shutdown(socket.SHUT_RDWR)
