"""A quota on an engine's KV blocks: blocks beyond it are parked, and their pages given back.

Parked blocks are taken from the free queue in vLLM's own eviction order (blocks without content,
then cached prefixes, least recently used first) and held by us, so no request can get them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from rose.executor.vllm import kv


class Parking:
    def __init__(self, pool: Any, block_bytes: int) -> None:
        self._pool = pool
        self._parked: list[Any] = []
        self._cold: dict[int, None] = {}
        """Blocks that were given back and whose pages may be missing, oldest first."""
        self.block_bytes = block_bytes
        self.blocks: int = pool.num_gpu_blocks - 1  # vLLM keeps block 0 as its null block
        pool.get_usage = self._usage

    @property
    def usable(self) -> int:
        """Blocks that are not parked."""
        return self.blocks - len(self._parked)

    @property
    def used(self) -> int:
        """Blocks held by requests."""
        return self.usable - int(self._pool.get_num_free_blocks())

    @property
    def usable_bytes(self) -> int:
        return self.usable * self.block_bytes

    def set_usable(self, wanted: int) -> int:
        """Park or give back until `wanted` blocks are usable; returns what could be reached."""
        wanted = max(0, min(wanted, self.blocks))
        excess = self.usable - wanted
        if excess > 0:
            taken = self._pool.get_new_blocks(min(excess, self._pool.get_num_free_blocks()))
            self._parked.extend(taken)
            for block in taken:
                self._cold.pop(block.block_id, None)
            if kv.MEMORY is not None and taken:
                kv.MEMORY.release(block.block_id for block in taken)
        elif excess < 0:
            back, self._parked = self._parked[excess:], self._parked[:excess]
            self._cold.update(dict.fromkeys(block.block_id for block in back))
            self._pool.free_blocks(back)
        return self.usable

    def bring(self, blocks: int) -> bool:
        """Have the pages of so many blocks that were given back; True when there are more.

        By the thread that parks: what is brought is not parked meanwhile, and may be in use.
        """
        cold = list(islice(self._cold, blocks))
        if kv.MEMORY is not None:
            kv.MEMORY.back(cold)
        for block in cold:
            self._cold.pop(block, None)
        return bool(self._cold)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Nothing is parked meanwhile; then the same blocks are again, as they are. Nobody may ask
        for blocks before."""
        parked = self._parked
        self._pool.free_blocks(parked)
        try:
            yield
        finally:
            self._pool.touch(parked)

    def _usage(self) -> float:
        """vLLM's own usage metric, with parked blocks counted as not used."""
        return self.used / self.blocks if self.blocks else 0.0
