"""Pages of KV memory on CPU: brought before they are used, given back when they are parked."""

from __future__ import annotations

import mmap
import resource
import threading
import time
from pathlib import Path

from rose.executor.vllm import kv

BLOCK, BLOCKS, LAYERS = 16 * mmap.PAGESIZE, 64, 4


def memory(blocks: int = BLOCKS, layers: int = LAYERS) -> kv.KvMemory:
    made = kv.KvMemory(BLOCK * blocks * layers)
    made.placements = [kv.Placement(0, layers, BLOCK * blocks, BLOCK)]
    return made


def resident(made: kv.KvMemory) -> int:
    """Bytes of the mapping that have physical memory."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (first := line.split()[0]) and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= made.tensor.data_ptr() < high
            low_end = made.tensor.data_ptr() + made.size
            inside |= made.tensor.data_ptr() <= low < low_end
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_blocks_that_are_brought_cost_no_faults_when_they_are_used() -> None:
    made = memory()
    made.tensor[16 * BLOCK : 17 * BLOCK] = 1  # and with it all code that this takes
    made.back(range(8))
    before = faults()
    made.tensor[4 * BLOCK : 5 * BLOCK] = 1
    brought = faults() - before
    made.tensor[12 * BLOCK : 13 * BLOCK] = 1
    assert brought == 0 < faults() - before


def test_bringing_leaves_what_is_there() -> None:
    made = memory()
    made.tensor[5 * BLOCK : 6 * BLOCK] = 7
    made.back(range(BLOCKS))
    assert made.tensor[5 * BLOCK : 6 * BLOCK].eq(7).all()
    assert not made.tensor[6 * BLOCK :].any()


def test_only_the_blocks_that_are_given_back_lose_their_memory() -> None:
    made = memory()
    made.back(range(BLOCKS))
    made.tensor[:] = 3
    held = resident(made)
    made.release(range(10, 20))
    assert held - resident(made) == 10 * BLOCK * LAYERS
    for layer in range(LAYERS):
        start = layer * BLOCK * BLOCKS
        blocks = made.tensor[start : start + BLOCK * BLOCKS].view(BLOCKS, BLOCK)
        assert not blocks[10:20].any()
        assert blocks[:10].eq(3).all() and blocks[20:].eq(3).all()


def test_bringing_memory_keeps_no_other_thread_waiting() -> None:
    """The engine computes meanwhile; it would stand still if Python's lock were held."""
    made = memory(1 << 12, layers=1)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    began = time.monotonic()
    made.back(range(1 << 12))
    ended = time.monotonic()
    done.set()
    ticker.join()
    assert sum(began < at < ended for at in ticks) > 2
