"""The picture shows what was measured, also what is far beyond the promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.bench import timeline
from rose.bench.colocated import Run
from rose.bench.stats import Sample
from rose.executor.slo import Slo


def run(mode: str, ttft_s: float) -> Run:
    samples = [
        Sample(i, float(i), float(i), i + ttft_s + 0.2, 8, 3, (i + ttft_s, i + ttft_s + 0.2))
        for i in range(5)
    ]
    return Run(mode, 5.0, samples=samples, began=0.0)


def test_no_point_is_cut_off() -> None:
    runs = [run("serving_alone", 0.1), run("share_all", 3.0), run("rose", 0.2)]
    figure = timeline.figure(runs, Slo(0.5, 0.3), 1 << 20, "title")
    for row in (1, 2):
        for cell in figure.axes[row * 3 : row * 3 + 3]:
            low, high = cell.get_ylim()
            points = cell.collections[0].get_offsets()
            assert len(points) == 5
            assert low == 0.0
            assert points[:, 1].max() < high
    assert figure.axes[4].get_ylim()[1] == pytest.approx(figure.axes[3].get_ylim()[1])


def test_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "picture.png"
    timeline.draw([run("rose", 0.1)], Slo(0.5, 0.3), 1 << 20, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
