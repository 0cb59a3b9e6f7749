"""`--worker-extension-cls rose.transfer.vllm.worker.Weights`: questions to all ranks at once.

vLLM imports this before its CPU workers look through all modules for kernels, and that search fails
over llvmlite's: so nothing here may import numba.
"""

from __future__ import annotations

from typing import Any


class Weights:
    """Mixed into vLLM's worker; asked by `/collective_rpc`."""

    weight_transfer_engine: Any

    def rose_weights(self, wanted: int | None = None) -> dict[str, Any]:
        """Of which store the model is which version, which is staged, what went wrong; `wanted`:
        look for it."""
        status: dict[str, Any] = _engine(self).status(wanted)
        return status

    def rose_digests(self) -> list[Any]:
        """Checksums of all slices in the live model."""
        digests: list[Any] = _engine(self).digests()
        return digests


def _engine(worker: Weights) -> Any:
    engine = worker.weight_transfer_engine
    if not hasattr(engine, "following"):
        raise RuntimeError('the engine was not started with weight transfer backend "rose"')
    return engine
