"""A run in pictures and lines, from the files it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rose.rl import watch
from rose.rl.metrics import METRICS, StepFacts

COLOURS = {"reward": "#2a7f4f", "rollout": "#d9822b", "serving": "#2a6fbb", "other": "#7a7f87"}
FREE = "#d8dde3"


def line(facts: StepFacts) -> str:
    return (
        f"step {facts.step:3d}  reward {facts.reward:.3f}  {facts.episodes} episodes  "
        f"{facts.episodes_per_s:.2f}/s  sample {facts.sample_s:.1f} s, "
        f"learn {facts.learn_s:.1f} s, sync {facts.sync_s:.2f} s ({facts.wire_bytes / 1e6:.2f} MB)"
        f"  engine differs by {facts.learned.logp_difference_mean:.1e}"
    )


def read(path: Path) -> list[dict[str, Any]]:
    """JSON lines; one that is being written is left out."""
    if not path.exists():
        return []
    return [json.loads(row) for row in path.read_text().splitlines(True) if row.endswith("\n")]


def write(out: Path) -> list[Path]:
    """The pictures of a run's folder."""
    steps, looks = read(out / METRICS), read(out / watch.FILE)
    made = []
    if steps:
        made.append(_save(_training(steps), out / "training.png"))
    if looks:
        made.append(_save(_fleet(looks), out / "fleet.png"))
    return made


def _save(picture: Any, path: Path) -> Path:
    picture.savefig(path, dpi=110)
    return path


def _training(steps: list[dict[str, Any]]) -> Any:
    """Reward, throughput, where a step's time goes, what weights cost, engine against trainer."""
    picture, cells = _figure(5, "training")
    at = [row["step"] for row in steps]
    cells[0].plot(at, [row["reward"] for row in steps], color=COLOURS["reward"], marker=".")
    cells[0].set_ylabel("reward")
    cells[1].plot(at, [row["episodes_per_s"] for row in steps], color=COLOURS["rollout"])
    cells[1].set_ylabel("episodes/s")
    cells[2].stackplot(
        at,
        *([row[name] for row in steps] for name in ("sample_s", "learn_s", "sync_s")),
        labels=["sampling", "learning", "weights"],
        colors=[COLOURS["rollout"], COLOURS["other"], COLOURS["serving"]],
    )
    cells[2].set_ylabel("seconds")
    cells[2].legend(fontsize=8, loc="upper right")
    cells[3].bar(at, [row["wire_bytes"] / 1e6 for row in steps], color=COLOURS["serving"])
    cells[3].set_ylabel("weights, MB")
    differences = [row["learned"]["logp_difference_max"] for row in steps]
    cells[4].plot(at, differences, color=COLOURS["other"], marker=".")
    cells[4].set_yscale("log")
    cells[4].set_ylabel("largest log-prob\ndifference")
    cells[4].set_xlabel("step")
    return _neat(picture, cells)


def _fleet(looks: list[dict[str, Any]]) -> Any:
    """Turns, devices, serving's requests and slack, memory of the devices that serve."""
    picture, cells = _figure(5, "fleet")
    at = [look["at"] - looks[0]["at"] for look in looks]

    def values(name: str, scale: float = 1.0) -> list[float]:
        return [look[name] / scale for look in looks]

    cells[0].stackplot(
        at, values("running"), values("waiting"), labels=["running", "waiting"],
        colors=[COLOURS["rollout"], FREE],
    )  # fmt: skip
    cells[0].set_ylabel("turns")
    cells[1].stackplot(
        at, values("dedicated"), values("lent"), labels=["dedicated", "borrowed"],
        colors=[COLOURS["other"], COLOURS["rollout"]], step="post",
    )  # fmt: skip
    cells[1].set_ylabel("devices")
    cells[2].fill_between(at, values("serving_requests"), step="post", color=COLOURS["serving"])
    cells[2].set_ylabel("serving requests")
    slack = [(t, look["slack_s"]) for t, look in zip(at, looks, strict=True)
             if look["slack_s"] is not None]  # fmt: skip
    cells[3].scatter([t for t, _ in slack], [s for _, s in slack], s=6, color=COLOURS["serving"])
    cells[3].axhline(0.0, color="#b02a2a", linewidth=1)
    cells[3].set_ylabel("least slack, s")
    mib = float(1 << 20)
    free = [max(0.0, (look["kv_total"] - look["kv_rollout"] - look["kv_serving"]) / mib)
            for look in looks]  # fmt: skip
    cells[4].stackplot(
        at, values("kv_rollout", mib), free, values("kv_serving", mib),
        labels=["rollout", "free", "serving"],
        colors=[COLOURS["rollout"], FREE, COLOURS["serving"]],
    )  # fmt: skip
    cells[4].set_ylabel("KV memory, MiB")
    cells[4].set_xlabel("seconds")
    for cell in (cells[0], cells[1], cells[4]):
        cell.legend(fontsize=8, loc="upper right")
    return _neat(picture, cells)


def _figure(rows: int, title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 2.1 * rows))
    cells = picture.subplots(rows, 1, sharex=True)
    picture.suptitle(title)
    return picture, cells


def _neat(picture: Any, cells: Any) -> Any:
    for cell in cells:
        cell.grid(alpha=0.25)
        cell.spines[["top", "right"]].set_visible(False)
    picture.tight_layout()
    return picture
