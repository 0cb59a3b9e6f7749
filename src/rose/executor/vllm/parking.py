"""A quota on an engine's KV blocks: blocks beyond it are parked, and their pages given back.

Parked blocks are taken from the free queue in vLLM's own eviction order (blocks without content,
then cached prefixes, least recently used first) and held by us, so no request can get them.
"""

from __future__ import annotations

from typing import Any

from rose.executor.vllm import kv


class Parking:
    def __init__(self, pool: Any, block_bytes: int) -> None:
        self._pool = pool
        self._parked: list[Any] = []
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

    def back(self, wanted: int) -> None:
        """Bring the pages of the blocks that `set_usable(wanted)` would give back; nobody else has
        them, so this needs no lock."""
        coming = wanted - self.usable
        if kv.MEMORY is not None and coming > 0:
            kv.MEMORY.back(block.block_id for block in self._parked[-coming:])

    def set_usable(self, wanted: int) -> int:
        """Park or give back until `wanted` blocks are usable; returns what could be reached."""
        wanted = max(0, min(wanted, self.blocks))
        excess = self.usable - wanted
        if excess > 0:
            taken = self._pool.get_new_blocks(min(excess, self._pool.get_num_free_blocks()))
            self._parked.extend(taken)
            if kv.MEMORY is not None and taken:
                kv.MEMORY.release(block.block_id for block in taken)
        elif excess < 0:
            back, self._parked = self._parked[excess:], self._parked[:excess]
            self._pool.free_blocks(back)
        return self.usable

    def _usage(self) -> float:
        """vLLM's own usage metric, with parked blocks counted as not used."""
        return self.used / self.blocks if self.blocks else 0.0
