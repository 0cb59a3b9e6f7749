"""`topk`: send only the largest changes. Lossy: receivers lag behind the trainer. Off by default.

What is not sent is not lost: the publisher compares the next version with what receivers have, not
with what the trainer had, so the rest of a change stays due until it is sent (error feedback).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from rose.transfer.delta import Bits
from rose.transfer.weights import SIGNED


def largest(old: Bits, new: Bits, dtype: str, share: float) -> Bits:
    """`new` where it is among the `share` of elements that change most, `old` elsewhere.

    Numbers that are none (NaN, infinities) are always sent; integers are never held back.
    """
    kind = getattr(torch, dtype)
    changed = np.flatnonzero(old != new)
    most = math.ceil(share * new.size)
    if changed.size <= most or not kind.is_floating_point:
        return new
    moves = np.abs(_numbers(new[changed], kind) - _numbers(old[changed], kind))
    moves[~np.isfinite(moves)] = np.inf
    first = changed.size - max(most, int(np.isinf(moves).sum()))
    sent = changed[np.argpartition(moves, first)[first:]]
    kept = old.copy()
    kept[sent] = new[sent]
    return kept


def _numbers(bits: Bits, kind: torch.dtype) -> np.ndarray:
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
    values: np.ndarray = signed.view(SIGNED[bits.itemsize]).view(kind).double().numpy()
    return values
