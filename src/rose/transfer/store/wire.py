"""Messages between a store's client and its server, and how the two come to trust each other.

    message     u32 length, msgpack (at most `MOST` bytes); raw bytes follow a `write` and the
                answer to a `read`
    greeting    server: nonce    client: its nonce, proof of the secret    server: its proof

Proofs are HMAC-SHA256 over both nonces and the prover's role, so neither side can replay the
other's, and the secret itself never travels. Without a secret the proofs use an empty one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from typing import Any, TypeVar

import msgspec

from rose.transfer.manifest import Step
from rose.transfer.store.base import StoreError

MOST = 64 << 20
"""Bytes of a message: a manifest of a trillion weights fits, an absurd length does not."""
SMALL = 64 << 10
"""Bytes of a message from somebody who has not shown the secret yet."""
LENGTH = struct.Struct("<I")
T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True):
    nonce: bytes
    proof: bytes = b""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    call: str
    job: str
    base: int | None = None
    version: int = 0
    rank: int = 0
    bucket: int = 0
    offset: int = 0
    length: int = 0
    """Of the bytes wanted, or of those that follow."""
    manifest: bytes = b""
    after: int | None = None
    """Of steps: wait a moment for a version newer than this."""
    writer: str = ""
    """Who writes: the same on all connections of a publisher."""

    @property
    def step(self) -> Step:
        return Step(self.base, self.version)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""
    steps: list[tuple[int | None, int, int]] = []
    """Base, version, bytes."""
    manifests: list[bytes] = []
    length: int = 0
    """Of the bytes that follow."""


def send(peer: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    peer.sendall(LENGTH.pack(len(body)) + body)


def receive(peer: socket.socket, kind: type[T], most: int = MOST) -> T:
    (length,) = LENGTH.unpack(receive_exactly(peer, LENGTH.size))
    if length > most:
        raise StoreError(f"a message of {length} bytes")
    try:
        return msgspec.msgpack.decode(receive_exactly(peer, length), type=kind)
    except msgspec.DecodeError as error:
        raise StoreError(f"a message that is none: {error}") from error


def receive_exactly(peer: socket.socket, length: int) -> bytearray:
    """`ConnectionError` when the peer goes away before."""
    data = bytearray(length)
    got = 0
    while got < length:
        count = peer.recv_into(memoryview(data)[got:])
        if not count:
            raise ConnectionError("the other side closed the connection")
        got += count
    return data


def greet_client(peer: socket.socket, secret: str) -> None:
    mine = secrets.token_bytes(32)
    send(peer, Hello(mine))
    theirs = receive(peer, Hello, SMALL)
    if not hmac.compare_digest(theirs.proof, _proof(secret, "client", mine, theirs.nonce)):
        send(peer, Answer(error="wrong secret"))
        raise StoreError("a client with a wrong secret")
    send(peer, Answer())
    send(peer, Hello(b"", _proof(secret, "server", mine, theirs.nonce)))


def greet_server(peer: socket.socket, secret: str) -> None:
    theirs = receive(peer, Hello, SMALL)
    mine = secrets.token_bytes(32)
    send(peer, Hello(mine, _proof(secret, "client", theirs.nonce, mine)))
    if error := receive(peer, Answer, SMALL).error:
        raise StoreError(error)
    shown = receive(peer, Hello, SMALL)
    if not hmac.compare_digest(shown.proof, _proof(secret, "server", theirs.nonce, mine)):
        raise StoreError("the server does not know the secret")


def _proof(secret: str, role: str, server: bytes, client: bytes) -> bytes:
    text: Any = role.encode() + server + client
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()
