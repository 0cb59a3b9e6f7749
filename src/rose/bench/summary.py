"""What the runs of `rose bench executor` say: per mode, and the keys of the design."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rose.bench.colocated import Run
from rose.bench.hits import PrefixHits
from rose.bench.stats import Sample, attainment, median_and_spread, p99_ratio, percentiles
from rose.bench.traffic import Users
from rose.executor.admission import Refusal
from rose.executor.slo import Slo

SLO_FACTOR = 1.5
AGAIN = "serving_again"
"""Serving alone a second time: how much two measurements of the same thing differ."""
NOTICED = 0.1
"""Of prompt tokens: below such a hit rate a ratio of rates is noise; their difference counts."""


def slo_from(calibration: Run) -> Slo:
    """The promises of a scenario: `SLO_FACTOR` x the P99 of serving alone."""
    ttft = percentiles(s.ttft_s for s in calibration.undisturbed)
    tpot = percentiles(s.tpot_s for s in calibration.undisturbed)
    if ttft is None or tpot is None:
        raise RuntimeError(
            "serving alone answered no request while this machine had its CPU time; see its log"
        )
    return Slo(SLO_FACTOR * ttft.p99, SLO_FACTOR * tpot.p99)


def line(run: Run, slo: Slo) -> str:
    ttft = percentiles(s.ttft_s for s in run.undisturbed)
    tpot = percentiles(s.tpot_s for s in run.undisturbed)
    parts = [f"{run.mode:<14}"]
    if ttft and tpot:
        share = attainment(run.samples, slo)
        parts.append(
            f"TTFT {ttft.p50 * 1e3:5.0f}/{ttft.p99 * 1e3:5.0f} ms  "
            f"TPOT {tpot.p50 * 1e3:4.0f}/{tpot.p99 * 1e3:4.0f} ms  "
            f"SLO {0 if share is None else share:7.2%}"
        )
    if (hits := run.prefixes.rate) is not None:
        parts.append(f"prefix hits {hits:3.0%}")
    parts.append(f"rollout {run.rollout_tokens / run.seconds:5.1f} tok/s")
    parts.append(f"device: serving {run.serving_cpu:.0%} rollout {run.rollout_cpu:.0%}")
    return "  ".join(parts)


def summary(runs: dict[str, list[Run]], slo: Slo, users: Users) -> dict[str, Any]:
    idle = 1.0 - _mean([r.serving_cpu for r in runs["serving_alone"]])
    dedicated = _mean([r.rollout_tokens / r.seconds for r in runs["rollout_alone"]])
    alone = [sample for one in runs["serving_alone"] for sample in one.undisturbed]
    modes: dict[str, Any] = {}
    for name, repeats in runs.items():
        samples = [sample for one in repeats for sample in one.samples]
        calm = [sample for one in repeats for sample in one.undisturbed]
        speeds = [r.rollout_tokens / r.seconds for r in repeats]
        modes[name] = {
            **_latencies(calm, alone),
            "requests": len(samples),
            "disturbed": len(samples) - len(calm),
            "ttft_all_s": _shown(_ttft(samples)),
            "tpot_all_s": _shown(_tpot(samples)),
            "slo_attainment": attainment(samples, slo),
            "slo_attainment_undisturbed": attainment(calm, slo),
            "kinds": _kinds(repeats, runs["serving_alone"], slo),
            "prefix_hit_rate": sum((r.prefixes for r in repeats), PrefixHits()).rate,
            "rollout_tok_s": asdict(median_and_spread(speeds)),
            "harvest_efficiency": _mean(speeds) / (dedicated * idle),
            "serving_cpu": _mean([r.serving_cpu for r in repeats]),
            "rollout_cpu": _mean([r.rollout_cpu for r in repeats]),
            "rollout_kv": _mean([_rollout_kv(r) for r in repeats]),
            "aborted_turns": sum(sum(r.rollout.aborts.values()) for r in repeats if r.rollout),
            "steps": _steps(repeats),
            "windows": [_window(run, slo) for run in repeats],
        }
    return {
        "slo": asdict(slo),
        "rate": users.rate,
        "workload": str(users),
        "idle_alone": idle,
        "modes": modes,
        "overhead_us": max(
            max(m.serving.overhead_us, m.rollout.overhead_us)
            for one in (*runs.get("rose", []), *runs.get("rose_gate", []), *runs["serving_alone"])
            for m in one.moments[-5:]
        ),
    }


def _latencies(calm: list[Sample], alone: list[Sample]) -> dict[str, Any]:
    return {
        "ttft_s": _shown(_ttft(calm)),
        "tpot_s": _shown(_tpot(calm)),
        "ttft_p99_vs_alone": _against(_ttft(calm), _ttft(alone)),
        "tpot_p99_vs_alone": _against(_tpot(calm), _tpot(alone)),
    }


def _kinds(repeats: list[Run], alone: list[Run], slo: Slo) -> dict[str, Any]:
    """Latencies of each kind of request, where a scenario has several."""
    judged = {kind for run in repeats for kind in run.of_kinds()}
    return {
        kind: {
            "requests": sum(len(run.of_kinds()[kind]) for run in repeats),
            "slo_attainment": attainment([s for r in repeats for s in r.of_kinds()[kind]], slo),
            **_latencies(_undisturbed(repeats, kind), _undisturbed(alone, kind)),
        }
        for kind in sorted(judged)
    }


def _undisturbed(runs: list[Run], kind: str) -> list[Sample]:
    return [one for run in runs for one in run.undisturbed if run.kinds.get(one.index) == kind]


def _rollout_kv(run: Run) -> float:
    """Mean share of the device's KV that rollouts held."""
    held = [
        moment.rollout.kv_resident / run.kv_total for moment in run.moments if moment.at_s >= 0.0
    ]
    return _mean(held)


def _steps(runs: list[Run]) -> dict[str, int]:
    """Rollout steps that were granted, and for what others were refused, in the windows."""
    names = ("granted", *(f"refused_{reason}" for reason in Refusal))
    counted = dict.fromkeys(names, 0)
    for run in runs:
        inside = [moment.rollout for moment in run.moments if moment.at_s >= 0.0]
        for name in names if inside else ():
            counted[name] += getattr(inside[-1], name) - getattr(inside[0], name)
    return counted


def _window(run: Run, slo: Slo) -> dict[str, Any]:
    return {
        "requests": len(run.samples),
        "disturbed": len(run.samples) - len(run.undisturbed),
        "ttft_s": _shown(_ttft(run.undisturbed)),
        "tpot_s": _shown(_tpot(run.undisturbed)),
        "slo_attainment": attainment(run.samples, slo),
        "prefix_hit_rate": run.prefixes.rate,
        "rollout_tok_s": run.rollout_tokens / run.seconds,
    }


def _ttft(samples: list[Sample]) -> list[float]:
    return [sample.ttft_s for sample in samples if sample.ttft_s is not None]


def _tpot(samples: list[Sample]) -> list[float]:
    return [sample.tpot_s for sample in samples if sample.tpot_s is not None]


def _shown(values: list[float]) -> dict[str, Any] | None:
    found = percentiles(values)
    return asdict(found) if found else None


def _against(ours: list[float], alone: list[float]) -> dict[str, Any] | None:
    return asdict(p99_ratio(ours, alone)) if ours and alone else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """The keys of the design, each the worst over the scenarios; `_gate` is without preemption."""
    scenarios = {name: part for name, part in found.items() if "modes" in part}
    ratios: dict[str, Any] = {}

    def against_alone(mode: str, what: str) -> float:
        p99s = [part["modes"][mode][f"{what}_p99_vs_alone"] for part in scenarios.values()
                if mode in part["modes"]]  # fmt: skip
        return max(one["value"] if one else float("inf") for one in p99s)

    def worst(mode: str, what: str) -> float:
        return float(min(p["modes"][mode][what] for p in scenarios.values() if mode in p["modes"]))

    ran = {mode for part in scenarios.values() for mode in part["modes"]}
    for mode, suffix in (("rose", ""), ("rose_gate", "_gate")):
        if mode in ran:
            for what in ("ttft", "tpot"):
                ratios[f"{what}_p99_vs_alone{suffix}"] = against_alone(mode, what)
            for what in ("slo_attainment", "harvest_efficiency"):
                ratios[f"{what}{suffix}"] = worst(mode, what)
    for mode in ("share_all", AGAIN):
        if mode in ran:
            for what in ("ttft", "tpot"):
                ratios[f"{mode}_{what}_p99_vs_alone"] = against_alone(mode, what)
    ratios["serving_alone_slo_attainment"] = min(
        part["modes"]["serving_alone"]["slo_attainment"] for part in scenarios.values()
    )
    ratios |= _prefix_ratios(scenarios)
    ratios["scheduler_overhead_us"] = max(part["overhead_us"] for part in scenarios.values())
    for part in ("memory", "policies", "orders"):
        ratios |= found.get(part, {}).get("ratios", {})
    return ratios


def _prefix_ratios(scenarios: dict[str, Any]) -> dict[str, float]:
    """What of serving's prefix hits is left; nothing where a mode or its hits were not measured."""
    rates = [
        {mode: row["prefix_hit_rate"] for mode, row in part["modes"].items()}
        for part in scenarios.values()
    ]
    rates = [one for one in rates if one["serving_alone"] is not None]
    if not rates:
        return {}
    ratios = {"prefix_hit_rate_alone": max(one["serving_alone"] for one in rates)}
    keys = {
        "rose": "prefix_hits_vs_alone",
        "rose_gate": "prefix_hits_vs_alone_gate",
        "share_all": "share_all_prefix_hits_vs_alone",
        AGAIN: f"{AGAIN}_prefix_hits_vs_alone",
    }
    for mode, key in keys.items():
        if left := [
            _left(one[mode], one["serving_alone"]) for one in rates if one.get(mode) is not None
        ]:
            ratios[key] = min(left)
    lost = [
        100.0 * (one["serving_alone"] - one[mode])
        for one in rates
        for mode in ("rose", "rose_gate")
        if one.get(mode) is not None
    ]
    if lost:
        ratios["prefix_hit_points_lost"] = max(lost)
    return ratios


def _left(rate: float, alone: float) -> float:
    """Of the prefix hits that serving has alone."""
    return rate / alone if alone >= NOTICED else 1.0 - (alone - rate)
