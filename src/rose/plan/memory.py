"""What fits into the HBM of a device: weights of one or two models, and KV cache in the rest.

Both engines of a device compute with weights in HBM. A rollout engine that is dormant has them on
the host and keeps only its process there; lending a device means that both sets fit with `headroom`
to spare, because activating must not push anything of serving's out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.plan.hardware import Gpu
from rose.plan.roofline import kv_bytes_per_rank
from rose.plan.shapes import ModelShape

USABLE = 0.9
"""Share of HBM that engines take: vLLM's default of gpu_memory_utilization for years."""
ENGINE_BYTES = 2.5e9
"""Of an engine that computes, on every GPU, besides weights and KV: activations of a step (1.0 to
1.8 GiB), CUDA context (0.3) and CUDA graphs (0.4), as vLLM logs them at start."""
DORMANT_BYTES = 2e9
"""Of an engine that sleeps: at most that much in the paper (arXiv 2605.06534)."""
HEADROOM = 0.2
"""Share of memory that serving keeps on a device it lends (the paper's H)."""
GB = 1e9


def free_bytes(
    gpu: Gpu,
    awake: Sequence[ModelShape],
    tp: int = 1,
    *,
    dormant: int = 0,
    headroom: float = 0.0,
) -> float:
    """Of every one of `tp` GPUs, for KV cache of all of `awake`; negative if they do not fit."""
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom {headroom} is not a share of memory from 0 to below 1.")
    engines = sum(shape.weight_bytes() / tp + ENGINE_BYTES for shape in awake)
    return gpu.hbm_bytes * (USABLE - headroom) - engines - dormant * DORMANT_BYTES


def kv_capacity_tokens(
    gpu: Gpu,
    shape: ModelShape,
    tp: int = 1,
    headroom: float = 0.0,
    *,
    beside: Sequence[ModelShape] = (),
    dormant: int = 0,
) -> int:
    """Most tokens in the KV cache of `shape`, if engines `beside` it have weights there but no KV.

    `dormant` is the number of engines that sleep on the device.
    """
    awake = [shape, *beside]
    free = free_bytes(gpu, awake, tp, dormant=dormant, headroom=headroom)
    return max(0, int(free / kv_bytes_per_rank(shape, tp)))


def check_fits(
    gpu: Gpu,
    serving: ModelShape,
    tp: int = 1,
    *,
    rollout: ModelShape | None = None,
    awake: bool = True,
    headroom: float = 0.0,
    context: int = 4096,
) -> None:
    """One sentence if no request of `context` tokens fits beside the weights.

    With a `rollout` model on the same device: of each, or of serving's alone while rollout sleeps.
    """
    models = [serving] if rollout is None or not awake else [serving, rollout]
    dormant = int(rollout is not None and not awake)

    def lacking(tp: int) -> float:
        kv = sum(kv_bytes_per_rank(model, tp) * context for model in models)
        return kv - free_bytes(gpu, models, tp, dormant=dormant, headroom=headroom)

    if (bytes_short := lacking(tp)) <= 0:
        return
    sizes = [n for n in (2, 4, 8) if n > tp and not any(model.heads % n for model in models)]
    enough = next((n for n in sizes if lacking(n) <= 0), None)
    names = " and ".join(model.name for model in models)
    weights = sum(model.weight_bytes() for model in models)
    advice = f"take tp {enough}" if enough else "take a larger GPU or a smaller model"
    raise ValueError(
        f"{names} ({weights / GB:.1f} GB of weights) with room for {context:,} tokens does not "
        f"fit on {tp} x {gpu.name} of {gpu.hbm_bytes / GB:.0f} GB, {headroom:.0%} of it headroom: "
        f"{bytes_short / GB:.1f} GB are lacking on each; {advice}."
    )
