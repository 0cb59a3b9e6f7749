"""`tcp://`: a store at the other end of a socket. Lost connections are made anew, reads go on.

A large read is cut into ranges that several connections fetch at once; each range goes on from the
byte at which its connection was lost. Writing a bucket or sealing a manifest again is harmless, so
those are simply repeated.
"""

from __future__ import annotations

import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from rose.transfer import manifest as manifests
from rose.transfer.manifest import Manifest, ManifestError, Step, check_job
from rose.transfer.store import wire
from rose.transfer.store.base import StoreError
from rose.transfer.store.wire import Answer, Request

CONNECTIONS = 4
"""One TCP stream seldom fills a long link."""
RANGE = 4 << 20
"""Bytes per request of a large read."""
PATIENCE_S = 10.0
"""How long a peer may say nothing, and how long a lost one is called again."""
AGAIN_S = 0.1
NO_STEP = Step(None, 0)
T = TypeVar("T")


class TcpStore:
    def __init__(
        self,
        address: tuple[str, int],
        job: str,
        *,
        secret: str = "",
        tls: ssl.SSLContext | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.job = check_job(job)
        self._address = address
        self._secret = secret
        self._tls = tls
        self._patience_s = patience_s
        self._writer = secrets.token_hex(16)
        self._idle: queue.LifoQueue[socket.socket] = queue.LifoQueue()
        self._pool = ThreadPoolExecutor(CONNECTIONS, "rose-tcp")
        self._closed = threading.Event()

    def steps(self, after: int | None = None) -> dict[Step, int]:
        answer = self._ask("steps", after=after)
        return {Step(base, version): size for base, version, size in answer.steps}

    def manifests(self, step: Step) -> list[Manifest]:
        answer = self._ask("manifests", step)
        try:
            found = [manifests.decode(one) for one in answer.manifests]
        except ManifestError as error:
            raise StoreError(f"{self.name}: {error}") from error
        if any((one.job, one.step) != (self.job, step) for one in found):
            raise StoreError(f"{self.name} answered with another step than {step}")
        return found

    def read(self, step: Step, rank: int, bucket: int, offset: int, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)

        def fetch(at: int) -> None:
            self._read_into(step, rank, bucket, offset + at, view[at : at + RANGE])

        starts = range(0, length, RANGE)
        if len(starts) == 1:
            fetch(0)
        else:
            list(self._pool.map(fetch, starts))
        return bytes(data)

    def write(self, step: Step, rank: int, bucket: int, data: bytes) -> None:
        self._ask("write", step, data, rank=rank, bucket=bucket, length=len(data))

    def seal(self, manifest: Manifest) -> None:
        self._ask("seal", manifest.step, rank=manifest.rank, manifest=manifests.encode(manifest))

    def remove(self, step: Step) -> None:
        self._ask("remove", step)

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()

    # ---- connections

    @property
    def name(self) -> str:
        return f"tcp://{self._address[0]}:{self._address[1]}"

    def _ask(
        self, call: str, step: Step = NO_STEP, data: bytes = b"", **more: int | bytes | None
    ) -> Answer:
        request = Request(
            call=call,
            job=self.job,
            base=step.base,
            version=step.version,
            writer=self._writer,
            **more,  # type: ignore[arg-type]
        )

        def act(peer: socket.socket) -> Answer:
            wire.send(peer, request)
            peer.sendall(data)
            return _good(wire.receive(peer, Answer))

        return self._insist(act, lambda: 0)

    def _read_into(self, step: Step, rank: int, bucket: int, offset: int, view: memoryview) -> None:
        got = 0

        def act(peer: socket.socket) -> None:
            nonlocal got
            left = len(view) - got
            wire.send(
                peer,
                Request(
                    call="read",
                    job=self.job,
                    base=step.base,
                    version=step.version,
                    rank=rank,
                    bucket=bucket,
                    offset=offset + got,
                    length=left,
                ),
            )
            if (said := _good(wire.receive(peer, Answer)).length) != left:
                raise StoreError(f"{self.name} sends {said} bytes instead of {left}")
            while got < len(view):
                count = peer.recv_into(view[got:])
                if not count:
                    raise ConnectionError("the connection was closed in the middle of a read")
                got += count

        self._insist(act, lambda: got)

    def _insist(self, act: Callable[[socket.socket], T], progress: Callable[[], int]) -> T:
        """Do it on one connection after the other, as long as there is progress."""
        reached, deadline = progress(), time.monotonic() + self._patience_s
        while True:
            try:
                with self._connection() as peer:
                    return act(peer)
            except OSError as error:
                if progress() > reached:
                    reached, deadline = progress(), time.monotonic() + self._patience_s
                if time.monotonic() > deadline or self._closed.wait(AGAIN_S):
                    raise StoreError(f"{self.name}: {error}") from error

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """An idle one, or a new one; kept for later if all went well, also with a refusal."""
        try:
            peer = self._idle.get_nowait()
        except queue.Empty:
            peer = self._connect()
        try:
            yield peer
        except StoreError as error:
            if isinstance(error, Refused):
                self._idle.put(peer)
            else:
                peer.close()
            raise
        except BaseException:
            peer.close()
            raise
        self._idle.put(peer)

    def _connect(self) -> socket.socket:
        peer = socket.create_connection(self._address, self._patience_s)
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                peer = self._tls.wrap_socket(peer, server_hostname=self._address[0])
            wire.greet_server(peer, self._secret)
        except BaseException:
            peer.close()
            raise
        return peer


class Refused(StoreError):
    """The other side understood and said no: the connection is still good."""


def _good(answer: Answer) -> Answer:
    if answer.error:
        raise Refused(answer.error)
    return answer
