"""Engines inside one process: what stock vLLM answers, and what ours do when everything is random.

Run as a script by `conftest.stock`: writes `<task>.json` into a folder, one file per task.
"""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

import msgspec
from vllm import LLM, SamplingParams

from rose import models
from rose.cluster import profiles
from rose.executor.facts import LeaseState, NodeOrders
from rose.executor.page import LAYOUT, Page
from rose.executor.vllm.rollout import RECLAIMED, RolloutScheduler
from rose.executor.vllm.serving import PULSE_S, ServingScheduler

KV = 8 << 20
PATIENCE_S = 60.0
OUTPUT = 48
SIZES = (5, 17, 33, 64, 100, 150, 260, 700)
"""Prompt lengths: within a block, at a block's border, over several, over a prefill chunk."""


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 255) for _ in range(size)] for size in SIZES]


def engine(model: str, **options: Any) -> LLM:
    return LLM(
        model=str(models.resolve(model)),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=KV,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        disable_log_stats=True,
        **options,
    )


def answers(llm: LLM, asked: list[list[int]]) -> list[Any]:
    """Greedy answers; turns that are ended early go on from their tokens so far."""
    made: list[list[int]] = [[] for _ in asked]
    ends = []
    while open_ := [i for i, tokens in enumerate(made) if len(tokens) < OUTPUT]:
        outputs = llm.generate(
            [{"prompt_token_ids": asked[i] + made[i]} for i in open_],
            [
                SamplingParams(temperature=0, max_tokens=OUTPUT - len(made[i]), ignore_eos=True)
                for i in open_
            ],
            use_tqdm=False,
        )
        for i, output in zip(open_, outputs, strict=True):
            made[i] += output.outputs[0].token_ids
            ends.append([output.outputs[0].finish_reason, output.outputs[0].stop_reason])
    return [made, ends]


def stock() -> Any:
    asked = prompts(0)
    return {
        model: {"prompts": asked, "tokens": answers(engine(model), asked)[0]}
        for model in ("tiny-a", "tiny-b")
    }


class Whims(RolloutScheduler):
    """Grants, memory and ends at random: every step gets another budget of tokens and blocks."""

    rng = random.Random(7)
    seen: ClassVar = {"refused": 0, "granted": 0, "preempted": 0, "ended": 0, "unplaced": 0}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate.tokens = self._tokens  # type: ignore[method-assign]

    def _tokens(self, decode: int) -> int:
        if self.rng.random() < 0.3:
            self.seen["refused"] += 1
            return 0
        self.seen["granted"] += 1
        return self.rng.choice((1, 2, 3, 7, 16, 33, 100, self._most_tokens))

    def _follow_memory(self, *, may_end: bool) -> bool:
        return False

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.device.guard.enter()
        one_request = 1024 // self.block_size
        self.device.parking.set_usable(self.rng.randrange(one_request, 2 * one_request))
        self.seen["preempted"] = max(
            [self.seen["preempted"], *(r.num_preemptions for r in self.requests.values())]
        )
        if self.running and self.rng.random() < 0.02:
            self.seen["ended"] += 1
            self._end([self.rng.choice(self.running)], RECLAIMED)
        self.device.guard.leave()
        output = super().schedule(throttle_prefills)
        self.seen["unplaced"] += not self.device.placed
        return output


class TakenBack(RolloutScheduler):
    """Is revoked after a few steps; counts how often it stood at the gate without any turns."""

    idle_waits = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at_gate, self.gate.tokens = self.gate.tokens, self._tokens  # type: ignore[method-assign]

    def _tokens(self, decode: int) -> int:
        TakenBack.idle_waits += not self.requests
        if self.gate.begun == 5:
            ORDERS.give(self.device.page, LeaseState.DORMANT)
        return self._at_gate(decode)


class Squeezed(RolloutScheduler):
    """Has memory for 256 tokens and never gets more."""

    def _follow_memory(self, *, may_end: bool) -> bool:
        self.device.parking.set_usable(256 // self.block_size)
        return False


class Crowded(RolloutScheduler):
    """Has memory for fewer turns than want to begin, and grow as they go."""

    seen: ClassVar = {"begun_beside": 0, "waited": 0, "least_left": 1 << 20}
    """Begun while others ran; steps after which some waited; fewest blocks left for each that ran
    when another began."""

    def _follow_memory(self, *, may_end: bool) -> bool:
        self.device.parking.set_usable(1024 // self.block_size)
        return False

    def schedule(self, throttle_prefills: bool = False) -> Any:
        running = len(self.running)
        output = super().schedule(throttle_prefills)
        parking = self.device.parking
        if running and (output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids):
            left = parking.usable - parking.used - running
            self.seen["least_left"] = min(self.seen["least_left"], left)
            self.seen["begun_beside"] += 1
        self.seen["waited"] += bool(self.waiting)
        return output


def rose(page: Path, model: str, **more: Any) -> dict[str, Any]:
    """What `--additional-config` would say."""
    profile = profiles.path_for(model, "auto", "cpu:0")
    common = {"device": "cpu:0", "page": str(page), "kv_total": KV, "profile": str(profile)}
    return {"rose": common | more}


class Orders:
    """What a node does for the page: orders, repeated."""

    def __init__(self) -> None:
        self.now = NodeOrders()
        self._page: Page | None = None
        threading.Thread(target=self._repeat, daemon=True).start()

    def give(self, page: Page, state: LeaseState) -> None:
        self._page = page
        self.now = NodeOrders(epoch=self.now.epoch + 1, state=state)
        self._say()
        page.ring("watch")

    def _say(self) -> None:
        assert self._page is not None
        orders = msgspec.structs.replace(self.now, written=time.monotonic())
        self._page.publish("node", orders)

    def _repeat(self) -> None:
        while True:
            if self._page is not None:
                self._say()
            time.sleep(0.2)


ORDERS = Orders()


def rollout_engine(path: Path, scheduler: type[RolloutScheduler]) -> LLM:
    ORDERS.give(Page.create(path, kv_total=KV, device="cpu:0"), LeaseState.ACTIVE)
    return engine(
        "tiny-b",
        scheduler_cls=scheduler,
        worker_cls="rose.executor.vllm.worker.ElasticWorker",
        additional_config=rose(path, "tiny-b", dedicated=True),
    )


def too_large(path: Path) -> Any:
    """A turn that does not fit, and one behind it that does."""
    llm = rollout_engine(path, Squeezed)
    asked = prompts(0)
    outputs = llm.generate(
        [{"prompt_token_ids": asked[SIZES.index(size)]} for size in (700, 5)],
        SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True),
        use_tqdm=False,
    )
    path.unlink()
    ends = [output.outputs[0] for output in outputs]
    return [[end.finish_reason, end.stop_reason, list(end.token_ids)] for end in ends]


def taken_back(path: Path) -> Any:
    llm = rollout_engine(path, TakenBack)
    outputs = llm.generate(
        [{"prompt_token_ids": asked} for asked in prompts(0)[:4]],
        SamplingParams(temperature=0, max_tokens=900, ignore_eos=True),
        use_tqdm=False,
    )
    path.unlink()
    return {
        "reasons": [output.outputs[0].stop_reason for output in outputs],
        "idle_waits": TakenBack.idle_waits,
    }


def random_grants(path: Path) -> Any:
    llm = rollout_engine(path, Whims)
    rounds = [answers(llm, prompts(0)) for _ in range(3)]
    path.unlink()
    return {"tokens": [r[0] for r in rounds], "ends": [r[1] for r in rounds], **Whims.seen}


def crowded(path: Path) -> Any:
    """Short turns that come after each other and grow to several blocks."""
    llm = rollout_engine(path, Crowded)
    rng = random.Random(5)
    asked = [[rng.randrange(5, 255) for _ in range(100)] for _ in range(16)]
    outputs = llm.generate(
        [{"prompt_token_ids": tokens} for tokens in asked],
        [
            SamplingParams(temperature=0, max_tokens=40 + 12 * i, ignore_eos=True)
            for i in range(len(asked))
        ],
        use_tqdm=False,
    )
    path.unlink()
    return {"reasons": [output.outputs[0].finish_reason for output in outputs], **Crowded.seen}


def forgets(path: Path) -> Any:
    """Prompts that serving has seen before, and what it finds of them after a reset."""
    page = Page.create(path, kv_total=KV, device="cpu:0")
    llm = engine(
        "tiny-a",
        scheduler_cls=ServingScheduler,
        worker_cls="rose.executor.vllm.worker.ElasticWorker",
        additional_config=rose(path, "tiny-a", ttft_ms=500, tpot_ms=100),
    )

    def again() -> int:
        """Serve the same prompt; how many of its tokens were known."""
        (output,) = llm.generate(
            [{"prompt_token_ids": prompts(0)[SIZES.index(260)]}],
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
            use_tqdm=False,
        )
        return output.num_cached_tokens or 0

    def keeps(warm: bool) -> bool:
        """Serving's second thread says so within a pulse, if it has a core."""
        deadline = time.monotonic() + PATIENCE_S
        while (reading := page.serving()) is None or bool(reading.facts.kv_warm) != warm:
            if time.monotonic() > deadline:
                return False
            time.sleep(PULSE_S)
        return True

    found: dict[str, Any] = {"before": [again(), again()], "kept": keeps(warm=True)}
    device = llm.llm_engine.engine_core.engine_core.scheduler.device
    device.guard.enter()
    device.parking.set_usable(40)
    parked = [block.block_id for block in device.parking._parked]
    found["reset"] = llm.reset_prefix_cache()
    found["parked_as_before"] = parked == [block.block_id for block in device.parking._parked]
    found["parked"] = len(parked)
    device.guard.leave()
    found["forgotten"] = keeps(warm=False)
    found["after"] = again()
    path.unlink()
    return found


def serve_beside(path: Path) -> Any:
    """A serving engine whose page is unusable: its answers, and whether it lends."""
    llm = engine(
        "tiny-a",
        scheduler_cls=ServingScheduler,
        worker_cls="rose.executor.vllm.worker.ElasticWorker",
        additional_config=rose(path, "tiny-a", ttft_ms=500, tpot_ms=100),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {"tokens": answers(llm, prompts(0))[0], "lends": scheduler.device is not None}


def unusable_pages(path: Path) -> Any:
    found = {}
    Page.create(path, kv_total=KV, device="cpu:0").publish("node", NodeOrders())
    in_use = path.read_bytes()
    bad = {
        "foreign": b"somebody else's file " * 200,
        "layout": in_use[:8] + (LAYOUT ^ 1).to_bytes(4, "little") + in_use[12:],
        "folder": None,
    }
    for kind, content in bad.items():
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        found[kind] = serve_beside(path)
        found[kind]["untouched"] = content is None or path.read_bytes() == content
    path.rmdir()
    return found


def main() -> None:
    folder, page = Path(sys.argv[1]), Path(sys.argv[2])
    tasks = {
        "stock": stock,
        "random_grants": lambda: random_grants(page),
        "too_large": lambda: too_large(page),
        "taken_back": lambda: taken_back(page),
        "crowded": lambda: crowded(page),
        "forgets": lambda: forgets(page),
        "unusable_pages": lambda: unusable_pages(page),
    }
    for name, task in tasks.items():
        part = folder / f"{name}.part"
        part.write_text(json.dumps(task()))
        part.rename(folder / f"{name}.json")


if __name__ == "__main__":
    main()
