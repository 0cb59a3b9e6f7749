"""`--worker-extension-cls rose.transfer.vllm.worker.Weights`: questions to all ranks at once."""

from __future__ import annotations

from typing import Any

from rose.transfer.vllm.engine import RoseEngine


class Weights:
    """Mixed into vLLM's worker; asked by `/collective_rpc`."""

    weight_transfer_engine: Any

    def rose_weights(self, wanted: int | None = None) -> dict[str, Any]:
        """Which version the model is, which is staged, what went wrong; `wanted`: look for it."""
        return _engine(self).following.status(wanted)

    def rose_digests(self) -> list[Any]:
        """Checksums of all slices in the live model."""
        return _engine(self).digests()


def _engine(worker: Weights) -> RoseEngine:
    engine = worker.weight_transfer_engine
    if not isinstance(engine, RoseEngine):
        raise RuntimeError('the engine was not started with weight transfer backend "rose"')
    return engine
