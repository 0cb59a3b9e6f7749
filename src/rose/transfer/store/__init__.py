"""Stores by address. One of another kind is one file here and a line in `open_store`."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from rose.transfer.store.base import Store, StoreError
from rose.transfer.store.files import FileStore
from rose.transfer.store.tcp import TcpStore

__all__ = ["SECRET", "Store", "StoreError", "open_store"]

SECRET = "ROSE_TRANSFER_SECRET"
"""Environment variable with the secret that a store's server and its clients share."""
AUTHORITY = "ROSE_TRANSFER_CA"
"""Environment variable with the file of the authority that signed a server's certificate."""


def open_store(url: str, job: str) -> Store:
    """`file:///folder` or `tcp://host:port`; `tls://host:port` is the latter, encrypted."""
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return FileStore(Path(parts.path), job)
    try:
        address = (parts.hostname or "", parts.port or 0)
    except ValueError as error:
        raise ValueError(f"store {url!r}: {error}") from error
    if parts.scheme not in ("tcp", "tls") or not all(address) or parts.path.strip("/"):
        raise ValueError(f"store {url!r} is not file:///folder, tcp://host:port or tls://host:port")
    tls = None
    if parts.scheme == "tls":
        authority = os.environ.get(AUTHORITY)
        try:
            tls = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise ValueError(f"store {url!r}: {AUTHORITY}={authority}: {error}") from error
    return TcpStore(address, job, secret=os.environ.get(SECRET, ""), tls=tls)
