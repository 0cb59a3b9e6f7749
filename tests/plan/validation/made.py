"""Results as benchmarks write them, made by the simulator: it should find itself in them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rose.bench import arena, e2e
from rose.bench.colocated import MODES
from rose.bench.cpu import Spent
from rose.bench.stats import Sample, Spread, percentiles
from rose.cluster.profiles import path_for
from rose.executor.latency import Profile
from rose.executor.slo import Slo
from rose.plan.validation import e2e as replayed
from rose.plan.validation import executor
from rose.plan.validation.compared import Seen

CONFIG = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64}
PROFILE = Profile("m", "cpu:0", 0.02, 0.0009, 0.0012, 2e-6, margin=1.06, error=0.015, steps=100)
SLO = {"ttft_s": 0.2, "tpot_s": 0.07}
EPISODES = ["29 11 9 11 9 11 9 11", "29 11", "29 11 9 11", "29 11 9 11 9 11 9 11 9 11 9 11"]


def model(folder: Path) -> str:
    """As much of a model as the simulator reads, and its profile."""
    path = folder / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    PROFILE.save(path_for(str(path), "auto", "cpu:0"))
    return str(path)


def written(path: Path, result: dict[str, Any]) -> Path:
    path.write_text(json.dumps(result))
    return path


def executor_result(folder: Path) -> dict[str, Any]:
    settings = {"model": model(folder), "device": "cpu:0", "kv_gb": 0.25, "seconds": 20.0,
                "repeats": 2, "quick": False}  # fmt: skip
    bench = executor._Bench(settings)
    part: dict[str, Any] = {"slo": SLO, "rate": 3.0, "modes": {}}
    for mode in ("serving_alone", "rollout_alone", "share_all", "rose", "rose_gate"):
        seen = bench.simulate("steady_60", part, MODES[mode], executor.AS_IS, 0)
        part["modes"][mode] = {
            "ttft_s": _shown(seen.ttft.tolist()),
            "tpot_s": _shown(seen.tpot.tolist()),
            "rollout_tok_s": asdict(Spread(*[seen.made_per_s] * 3, 2)),
        }
    return {"bench": "executor", "settings": settings, "modes": {"memory": {}, "steady_60": part}}


def _shown(values: list[float]) -> dict[str, Any] | None:
    found = percentiles(values)
    return asdict(found) if found else None


def e2e_result(folder: Path) -> dict[str, Any]:
    """Two steps a run; in the first a group is of no use, and another takes its place."""
    name = model(folder)
    result: dict[str, Any] = {
        "bench": "e2e",
        "settings": {"model": name, "serving": name, "rate": 2.0, "trace": None,
                     "training": {"train": {"tasks": 2}}},
        "profiles": {key: asdict(PROFILE) for key in ("serving", "lent", "dedicated")},
    }  # fmt: skip
    groups = [EPISODES * 4, EPISODES * 2, EPISODES * 4]
    steps = [{"step": 1, "groups": groups, "useless": [1]},
             {"step": 2, "groups": groups[:2], "useless": []}]  # fmt: skip
    bench = replayed._Bench(result, Slo(**SLO))
    runs = {mode: [_run(bench, mode, steps)] for mode in ("static", "elastic", "share_all", "rose")}
    part = json.loads(json.dumps(e2e.summary(runs, Slo(**SLO))))
    return result | {"modes": {"dapo": part}}


def _run(bench: Any, mode: str, steps: list[dict[str, Any]]) -> arena.Run:
    rest_s, turn_s, front_s = 2.0, 0.005, 0.004
    told = {"seed": 7, "window": (5.0, 5.0), "activating_s": 4.0, "starting_cpu_s": 3.0,
            "cpu": asdict(Spent()),
            "steps": [{"turns": 1.0, "episodes": 1} | step for step in steps]}  # fmt: skip
    given = replayed.Given(rest_s, turn_s, front_s=front_s)
    seen = bench.simulate(arena.MODES[mode], [told], given, 0)
    episodes = sum(len(group) for step in steps for group in step["groups"])
    turns = sum(len(one.split()) // 2 for step in steps for g in step["groups"] for one in g)
    seconds, count = episodes / seen.made_per_s, len(steps)
    rows = [
        {"step": i + 1, "episodes": episodes / count, "groups_tried": 2, "turns": turns / episodes,
         "tokens": 1000, "sample_s": bench.sampled_s / count, "learn_s": 1.5, "sync_s": 0.5,
         "step_s": seconds / count, "at": 0.0, "reward": 0.5}
        for i in range(count)
    ]  # fmt: skip
    host_s = turns * turn_s + len(seen.ttft) * front_s
    cpu = Spent(seconds, bench.served_s, {}, 0.0, bench.served_s + host_s)
    return arena.Run(mode, rows, _samples(seen), seed=7, window=(5.0, 5.0 + seconds),
                     lengths=steps, activating_s=4.0, starting_cpu_s=3.0, cpu=cpu)  # fmt: skip


def _samples(seen: Seen) -> list[Sample]:
    return [
        Sample(i, 0.0, 0.0, ttft + tpot, 8, 2, (ttft, ttft + tpot), "stop")
        for i, (ttft, tpot) in enumerate(zip(seen.ttft, seen.tpot, strict=False))
    ]
