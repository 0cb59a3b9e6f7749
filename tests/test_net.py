"""Ports and sockets of services."""

from __future__ import annotations

import asyncio
import socket

from rose.cluster.engine import bound
from rose.net import tcp_socket


def test_an_answer_is_sent_at_once() -> None:
    """What asyncio serves on our sockets does not wait for acknowledgements (Nagle)."""
    assert asyncio.run(_delays(tcp_socket())) == 0
    assert asyncio.run(_delays(bound(0, "port"))) == 0


async def _delays(listener: socket.socket) -> int:
    """Whether the server's side of a connection collects small writes."""
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def met(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("socket")
        found.set_result(not peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(met, sock=listener) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        delays = await found
        writer.close()
    return int(delays)
