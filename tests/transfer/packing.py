"""Run as a script by `test_packed`: packs matrices with vLLM's kernel and writes what was found."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops

from rose.transfer.vllm import packed
from rose.transfer.vllm.packed import Packed


def kernel_for(handler: Any) -> Any:
    """As vLLM makes it: the handler is in the closure."""
    return lambda x, weight, bias: ops.onednn_mm(handler, x, bias)


class Handler:
    def __init__(self, address: int) -> None:
        self.handler_tensor = torch.tensor(address)


def change(shape: tuple[int, int]) -> Any:
    weight = torch.randn(shape)
    kernel = kernel_for(ops.create_onednn_mm(weight.t(), 32))
    inside = Packed.find(kernel, weight)
    if inside is None:
        return {"found": False}
    spots = np.flatnonzero(np.random.default_rng(1).random(weight.numel()) < 0.3)
    values = torch.randn(spots.size)
    inside.memory.index_copy_(0, torch.from_numpy(inside.places(spots)), values.view(torch.int32))
    weight.view(-1)[torch.from_numpy(spots)] = values
    same = torch.equal(kernel(torch.eye(shape[1]), None, None), weight.t())
    return {"found": True, "multiplies with": "what was written" if same else "something else"}


def main(shapes: list[list[int]]) -> Any:
    torch.manual_seed(0)
    found = {str(shape): change(tuple(shape)) for shape in shapes}
    weight = torch.randn(96, 48)
    kernel = kernel_for(ops.create_onednn_mm(weight.t(), 32))
    weight[95, 47] += 1
    found["another weight"] = Packed.find(kernel, weight)
    found["plain kernel"] = Packed.find(torch.nn.functional.linear, weight)
    elsewhere = torch.zeros(1024, dtype=torch.int64)
    found["a handler that is none"] = Packed.find(
        kernel_for(Handler(elsewhere.data_ptr())), weight
    ) or Packed.find(kernel_for(Handler(8)), weight)
    found["memory that ends too soon"] = packed._is_readable(0, 1 << 20) or packed._is_readable(
        elsewhere.data_ptr(), 1 << 46
    )
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(main(json.loads(sys.argv[2]))))
