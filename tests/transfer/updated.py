"""A vLLM engine that is brought to another version, or a fresh one that starts from it.

Run as a script by `test_in_engines`: writes what it answers to `MODEL.json`. The layers keep their
weights as vLLM does on this machine (float32: packed by oneDNN), or `unpacked`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank wants a NUMA node of its own
}

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

PROMPTS = [[5, 6, 7, 8], list(range(20, 60)), list(range(200, 100, -3))]


def engine(model: Path, ranks: int) -> LLM:
    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=8 << 20,
        tensor_parallel_size=ranks,
        disable_log_stats=True,
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "rose"},
        worker_extension_cls="rose.transfer.vllm.worker.Weights",
    )


def answers(llm: LLM) -> Any:
    """Tokens and log-probs of prompt and answer, exactly."""
    wanted = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=0
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], wanted, use_tqdm=False)
    return [
        [
            list(one.outputs[0].token_ids),
            [
                sorted((token, lp.logprob) for token, lp in step.items())
                for step in [*(one.prompt_logprobs or [])[1:], *one.outputs[0].logprobs]
            ],
        ]
        for one in outputs
    ]


def update(llm: LLM, version: int) -> None:
    while not all(
        version in (rank["staged"], rank["version"])
        for rank in llm.collective_rpc("rose_weights", args=(version,))
    ):
        time.sleep(0.05)
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"version": version},))
    llm.collective_rpc("finish_weight_update")


def unpacked() -> None:
    """CPU layers as where no kernel packs their weights: those are updated in place."""
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def main(folder: Path, model: str, ranks: int) -> Any:
    """With `base`: its answers, then those after an update from a version that it had to compare
    itself with, by one of which it knows what changed. `again`: the same engine started anew, from
    the host's copy alone. With another model: its answers."""
    llm = engine(folder / ("base" if model == "again" else model), ranks)
    answered = {"before": answers(llm)}
    store = {"store": f"file://{folder}/store", "job": "job", "folder": str(folder / "copy")}
    if model == "again":
        nobody = store | {"store": "tcp://127.0.0.1:9"}
        llm.collective_rpc("init_weight_transfer_engine", args=(nobody,))
        update(llm, 2)
        answered["after"] = answers(llm)
    if model == "base":
        llm.collective_rpc("init_weight_transfer_engine", args=(store,))
        update(llm, 1)
        kernels = llm.apply_model(kernels_of) if ranks == 1 else []
        publish(folder)
        update(llm, 2)
        answered |= {"after": answers(llm), "digests": llm.collective_rpc("rose_digests")}
        answered["in place"] = kernels == (llm.apply_model(kernels_of) if ranks == 1 else [])
    return answered


def publish(folder: Path) -> None:
    from rose.transfer import Publisher  # not before vLLM has started: it does not bear numba
    from rose.transfer.store.files import FileStore

    weights = load_file(folder / "newest" / "model.safetensors")
    Publisher(FileStore(folder / "store", "job")).publish(weights, 2)


def kernels_of(model: torch.nn.Module) -> list[int]:
    return [id(module.cpu_linear) for module in model.modules() if hasattr(module, "cpu_linear")]


if __name__ == "__main__":
    where, model, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if sys.argv[4] == "unpacked":
        unpacked()
    (where / f"{model}.json").write_text(json.dumps(main(where, model, ranks)))
