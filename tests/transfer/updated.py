"""vLLM engines that are brought to another version, and fresh ones that start from it.

Run as a script by `test_in_engines`: writes what they answer to `CASE/MODEL.json`. The layers keep
their weights as vLLM does on this machine (float32: packed by oneDNN), or `unpacked`. One process
starts all engines of a number of ranks: importing vLLM takes longer than all they do. Workers are
forks of it (vLLM would spawn them on CPUs), and so is who publishes: no worker starts where numba
is.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to look at workers' models
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank wants a NUMA node of its own
}

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.model_executor.layers import utils
from vllm.v1.executor import multiproc_executor

FORKED = multiprocessing.get_context("fork")
multiproc_executor.get_mp_context = lambda: FORKED
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
        distributed_executor_backend="mp",
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


@contextmanager
def layers(case: str) -> Iterator[None]:
    """Where no kernel packs the weights of CPU layers, those are updated in place."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    stock = utils.dispatch_cpu_unquantized_gemm
    if case.endswith("unpacked"):
        utils.dispatch_cpu_unquantized_gemm = dispatch
    yield
    utils.dispatch_cpu_unquantized_gemm = stock


def bring(folder: Path, ranks: int, *, again: bool) -> None:
    """The answers of `base` before and after an update from a version that it had to compare itself
    with by one of which it knows what changed; those of a fresh `newest`; and `again` those of a
    `base` that is started anew and has only the host's copy."""
    with running(folder / "newest", ranks) as llm:
        write(folder, "newest", {"before": answers(llm)})
    with running(folder / "base", ranks) as llm:
        write(folder, "base", update_twice(folder, llm))
    if again:
        with running(folder / "base", ranks) as llm:
            write(folder, "again", update_alone(folder, llm))


@contextmanager
def running(model: Path, ranks: int) -> Iterator[LLM]:
    before = shared_memory()
    llm = engine(model, ranks)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    for left in shared_memory() - before:  # vLLM's ranks forget it when they are ended
        left.unlink(missing_ok=True)


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("vllm_dist_*"))


def update_twice(folder: Path, llm: LLM) -> dict[str, Any]:
    answered = {"before": answers(llm)}
    llm.collective_rpc("init_weight_transfer_engine", args=(source(folder),))
    update(llm, 1)
    kernels = llm.apply_model(kernels_of)
    publishing = FORKED.Process(target=publish, args=(folder,))
    publishing.start()
    publishing.join()
    update(llm, 2)
    answered |= {"after": answers(llm), "digests": llm.collective_rpc("rose_digests")}
    answered["in place"] = kernels == llm.apply_model(kernels_of)
    return answered


def update_alone(folder: Path, llm: LLM) -> dict[str, Any]:
    answered = {"before": answers(llm)}
    nobody = source(folder) | {"store": "tcp://127.0.0.1:9"}
    llm.collective_rpc("init_weight_transfer_engine", args=(nobody,))
    update(llm, 2)
    return answered | {"after": answers(llm)}


def source(folder: Path) -> dict[str, str]:
    return {"store": f"file://{folder}/store", "job": "job", "folder": str(folder / "copy")}


def write(folder: Path, name: str, answered: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(answered))


def publish(folder: Path) -> None:
    from rose.transfer import Publisher
    from rose.transfer.store.files import FileStore

    weights = load_file(folder / "newest" / "model.safetensors")
    Publisher(FileStore(folder / "store", "job")).publish(weights, 2)


def kernels_of(model: torch.nn.Module) -> list[int]:
    return [id(module.cpu_linear) for module in model.modules() if hasattr(module, "cpu_linear")]


if __name__ == "__main__":
    where, ranks, *cases = sys.argv[1:]
    for case in cases:
        with layers(case):
            bring(Path(where) / case, int(ranks), again=case == cases[0])
