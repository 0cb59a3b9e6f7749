"""The promise to serving under every fault: a thousand histories of a simulated device, and holes
planted again that they must find."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rose.bench.bench_cli import app
from rose.bench.trust import history, simulate
from rose.bench.trust.disk import Disk
from rose.bench.trust.planted import HOLES, planted
from rose.bench.trust.virtual import Stalled, Table, VirtualLoop

SEEDS, AT_ONCE = 1_000, 125


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_history_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        outcome = history.run(seed)
        assert not outcome.broken, f"seed {seed}, {outcome.faults}: {outcome.broken}"
        assert outcome.unseen_launches == 0


@pytest.mark.parametrize("hole", HOLES)
def test_a_planted_hole_is_found(hole: str) -> None:
    assert simulate.first_found(hole, SEEDS) is not None


def test_holes_are_closed_again() -> None:
    for hole in HOLES:
        with planted(hole):
            pass
    assert not history.run(0).broken


def test_a_seed_is_a_history() -> None:
    assert history.run(7) == history.run(7)
    assert history.run(7).faults != history.run(8).faults


@pytest.mark.parametrize("seed", [18, 139])
def test_a_history_knows_no_clock_but_its_own(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have a rolling restart, of which the page keeps the time."""
    as_it_is = history.run(seed)
    for name in ("monotonic", "time", "perf_counter"):
        monkeypatch.setattr(f"time.{name}", lambda: 1.0)
    assert history.run(seed) == as_it_is


def test_histories_silence_nobody_else() -> None:
    before = logging.getLogger("rose.node").level
    history.run(0)
    assert logging.getLogger("rose.node").level == before


def test_every_fault_happens() -> None:
    seen = {fault for seed in range(200) for fault in history.run(seed).faults}
    assert seen == set(history.FAULT)


def test_the_command_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hole = "S9 a window outlives the request that came"
    monkeypatch.setattr(simulate, "HOLES", {hole: HOLES[hole]})
    target = tmp_path / "trust.json"
    words = ["trust", "--quick", "--no-drill", "--seeds", "6", "--json", str(target)]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    ratios = json.loads(target.read_text())["ratios"]
    assert ratios == {
        "seeds": 6,
        "broken_promises": 0,
        "planted": 1,
        "planted_found": 1,
        "grants_unseen": 0,
    }


def test_virtual_time_passes_only_when_everybody_waits() -> None:
    loop = VirtualLoop(100.0)

    async def wait() -> list[float]:
        began = loop.time()
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(10.0))
        return [began, loop.time()]

    assert loop.run_until_complete(wait()) == pytest.approx([100.0, 3700.0])
    with pytest.raises(Stalled):
        loop.run_until_complete(asyncio.Event().wait())
    loop.close()


def test_processes_stop_hold_and_die() -> None:
    loop, table = VirtualLoop(0.0), Table()
    seen: list[float] = []

    async def scene() -> None:
        process = table.start("one")

        async def tick() -> None:
            while True:
                await process.sleep(1.0)
                seen.append(loop.time())

        process.spawn(tick())
        await asyncio.sleep(2.5)
        process.stop()
        await asyncio.sleep(5.0)
        process.cont()
        await asyncio.sleep(1.2)
        process.hold(True)
        process.kill()
        assert process.alive
        process.hold(False)
        assert not process.alive
        await asyncio.sleep(5.0)

    loop.run_until_complete(scene())
    loop.close()
    assert seen == pytest.approx([1.0, 2.0, 7.5, 8.5])


def test_a_full_disk_takes_nothing_and_loses_nothing() -> None:
    disk = Disk()
    path = disk.path("shm/page.json")
    path.write_text("before")
    disk.full.add("shm")
    with pytest.raises(OSError, match="No space left"):
        path.write_text("after")
    assert path.read_text() == "before"
    disk.path("disk/other").write_text("elsewhere there is room")
