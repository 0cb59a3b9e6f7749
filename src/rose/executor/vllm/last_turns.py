"""Which cached prefixes go first: those of trajectories that have ended.

vLLM evicts the least recently used blocks. A turn marked as its trajectory's last leaves blocks
that nobody will ask for again, so they go to the front of that order.
"""

from __future__ import annotations

from typing import Any

LAST_TURN = "rose_last_turn"
"""`vllm_xargs` key: nothing of this trajectory will come back, its prefix may go first."""


class LastTurns:
    """Takes the place of the KV cache manager's `free`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._stock_free = manager.free
        self._marked: set[str] = set()
        manager.free = self._free

    def note(self, request: Any) -> None:
        params = request.sampling_params
        if params is not None and params.extra_args and params.extra_args.get(LAST_TURN):
            self._marked.add(request.request_id)

    def _free(self, request: Any) -> None:
        blocks: list[Any] = []
        if request.is_finished() and request.request_id in self._marked:
            self._marked.remove(request.request_id)
            groups = self._manager.get_blocks(request.request_id).blocks
            blocks = [block for group in groups for block in group]
        self._stock_free(request)
        free = [b for b in blocks if b.ref_cnt == 0 and not b.is_null]
        queue = self._manager.block_pool.free_block_queue
        for block in free:
            queue.remove(block)
        queue.prepend_n(free)
