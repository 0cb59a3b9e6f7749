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
            kv.Placement(part.offset, len(part.layers), part.layer_stride, part.block_stride)
            for part in kv_cache_config.kv_cache_tensors
        ]
        kv.MEMORY = memory

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample with the generators of half-prefilled requests put aside.

        Their token is thrown away, and vLLM then rewinds their generator, which CPU generators
        cannot do: a seeded request in a chunked prefill would kill the engine. A generator that
        was not used needs no rewinding.
        """
        runner = self.model_runner
        batch = runner.input_batch
        unused = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        aside = {int(i): batch.generators.pop(int(i), None) for i in unused}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            batch.generators.update({i: g for i, g in aside.items() if g is not None})
