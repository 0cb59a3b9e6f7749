"""A CPU worker whose KV cache is lazily mapped, so that parked blocks hold no physical memory.

GPU (not yet run): the same hook would return a VMM-backed pool; until then use vLLM's own worker,
where parking enforces the quota but returns no HBM.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rose.executor.vllm import kv


class ElasticWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = kv.LazyZeros()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache":
            return self._lazy
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        memory = self._lazy.memory
        if memory is None:
            raise RuntimeError("vLLM did not allocate its KV cache where rose expected it")
        memory.placements = [
            kv.Placement(tensor.offset, len(tensor.layers), tensor.layer_stride, tensor.block_stride)
            for tensor in kv_cache_config.kv_cache_tensors
        ]
        kv.MEMORY = memory
