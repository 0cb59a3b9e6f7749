"""Weights from a trainer to engines elsewhere: only what changed, bit for bit.

Imported on first use: vLLM loads its plugins from this package before it can bear numba, see
`vllm.worker`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rose.transfer.publisher import Publisher
    from rose.transfer.subscriber import Subscriber

__all__ = ["Publisher", "Subscriber"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.lower()}"), name)
