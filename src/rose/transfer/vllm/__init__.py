"""Weights into a running vLLM engine: the weight-transfer backend `rose`.

`--weight-transfer-config '{"backend": "rose"}'` is all an engine needs: vLLM finds `register` by an
entry point of this package.
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes, sometimes twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if "rose" not in Factory._registry:
        Factory.register_engine("rose", "rose.transfer.vllm.engine", "RoseEngine")
