"""Which slice of which checkpoint tensor a worker keeps where, as its model's own loader sees it.

Fused layers, tensor and pipeline parallel slices, experts, padded vocabularies: vLLM's loaders know
all of that, so they are asked. A second model without memory (on the `meta` device) is given the
checkpoint's tensors, without memory too, and every copy its loaders make is noted: from which
slice, into which part of which parameter. Takes milliseconds, moves nothing.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.utils import initialize_model

from rose.transfer import layout
from rose.transfer.errors import TransferError
from rose.transfer.layout import Box, Shape, Shard
from rose.transfer.manifest import Tensor


class Placed(NamedTuple):
    """A box of a tensor, and where its elements are in the memory of a parameter."""

    tensor: str
    box: Box
    parameter: str
    offset: int
    stride: Shape

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)

    @property
    def shard(self) -> Shard:
        return Shard(self.tensor, self.box, self.parameter, self.offset)


class Placement(NamedTuple):
    placed: dict[str, list[Placed]]
    """By parameter."""
    parameters: dict[str, torch.Tensor]
    """As the loaders want them: shape, stride and dtype, without memory."""
    same: dict[str, str]
    """Of each parameter's names the one used in `placed`: tied ones have several."""


def find(vllm_config: Any, tensors: Iterable[Tensor]) -> Placement:
    model = _without_memory(vllm_config)
    offered = {
        tensor.name: torch.empty(
            tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta", requires_grad=False
        )
        for tensor in tensors
    }
    with _Copies() as copies:
        try:
            model.load_weights(iter(offered.items()))
        except Exception as error:  # whatever a model's loader does with a name it does not know
            raise TransferError(f"this model cannot load the published tensors: {error}") from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[int, str] = {}
    same = {name: owners.setdefault(_memory(one), name) for name, one in parameters.items()}
    names = {_memory(tensor): name for name, tensor in offered.items()}
    placed: dict[str, list[Placed]] = defaultdict(list)
    for into, source in copies.seen:
        if (parameter := owners.get(_memory(into))) is None:
            continue
        if (name := names.get(_memory(source))) is None:
            raise TransferError(f"the model computes {parameter} from what it loads")
        placed[parameter].append(_placed(name, offered[name].shape, source, parameter, into))
    used = {one.tensor for parts in placed.values() for one in parts}
    for name in offered:
        if name not in used and not _left_out(vllm_config, model, name):
            raise TransferError(f"this model has no place for {name}")
    return Placement(dict(placed), parameters, same)


class _Copies(TorchDispatchMode):
    """Notes what is copied where."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.seen.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _without_memory(vllm_config: Any) -> Any:
    """The worker's model once more, on the meta device, unknown to everything else."""
    own = copy.copy(vllm_config)
    own.compilation_config = copy.copy(vllm_config.compilation_config)
    own.compilation_config.static_forward_context = {}
    with torch.device("meta"):
        return initialize_model(own)


def _placed(
    name: str, shape: Iterable[int], source: torch.Tensor, parameter: str, into: torch.Tensor
) -> Placed:
    whole = tuple(shape)
    if source.shape != into.shape or (source.dim() != len(whole) and source.numel() != 1):
        raise TransferError(f"the model reshapes {name} on its way into {parameter}")
    if source.dim() != len(whole):
        return Placed(
            name, layout.whole(whole), parameter, into.storage_offset(), (1,) * len(whole)
        )
    rows = torch.empty(whole, device="meta").stride()
    if any(
        extent > 1 and stride != row
        for extent, stride, row in zip(source.shape, source.stride(), rows, strict=True)
    ):
        raise TransferError(f"the model reorders {name} on its way into {parameter}")
    left, start = source.storage_offset(), []
    for row in rows:
        start.append(left // row)
        left %= row
    box = tuple((at, at + extent) for at, extent in zip(start, source.shape, strict=True))
    return Placed(name, box, parameter, into.storage_offset(), tuple(into.stride()))


def _left_out(vllm_config: Any, model: Any, name: str) -> bool:
    """Whether a tensor rightly has no place here: another stage's, or a tied head's."""
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    return staged or (tied and name.startswith("lm_head."))


def _memory(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity
