"""Cross-process wait and wake on a 32-bit word of shared memory (Linux futex)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def wait(address: int, seen: int, timeout_s: float) -> bool:
    """Sleep until the word differs from `seen` or a wake arrives. False when the time ran out."""
    if timeout_s <= 0:
        return False
    whole = int(timeout_s)
    spec = _Timespec(whole, int((timeout_s - whole) * 1e9))
    result = _libc.syscall(
        _SYSCALL, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(seen), ctypes.byref(spec), 0, 0
    )
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return True
    if code == errno.ETIMEDOUT:
        return False
    raise OSError(code, os.strerror(code))


def wake_all(address: int) -> None:
    _libc.syscall(_SYSCALL, ctypes.c_void_p(address), _WAKE, ctypes.c_int(2**31 - 1), 0, 0, 0)
