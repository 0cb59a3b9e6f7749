"""Addresses of this machine, and what one says at a guarded door."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bearer(secret: str) -> dict[str, str]:
    """Headers for a service that asks for a secret; none without one."""
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def tcp_socket() -> socket.socket:
    """A socket to listen with that names its protocol: asyncio sends at once on those alone. Else
    the end of an answer waits for the other side's acknowledgement, 40 ms at worst (Nagle)."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)


def free_ports(count: int) -> list[int]:
    """Of the loopback, all different; whoever is quick may still take one."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
