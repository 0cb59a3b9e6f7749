"""A quota on vLLM's own block pool."""

from __future__ import annotations

import pytest
from vllm.v1.core.block_pool import BlockPool

from rose.executor.vllm import kv
from rose.executor.vllm.parking import Parking

BLOCK = 1 << 16
BLOCKS = 16


class Memory:
    """What was asked of the physical memory."""

    def __init__(self) -> None:
        self.resident: set[int] = set()

    def release(self, blocks: list[int]) -> None:
        self.resident -= set(blocks)

    def back(self, blocks: list[int]) -> None:
        self.resident |= set(blocks)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(kv, "MEMORY", memory)
    return memory


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=16)


def free(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def test_pages_of_blocks_that_come_back_are_brought_in_the_order_of_their_use(
    pool: BlockPool, memory: Memory
) -> None:
    parking = Parking(pool, BLOCK)
    parking.set_usable(0)
    parking.set_usable(BLOCKS)
    assert parking.bring(6)
    assert memory.resident == set(free(pool)[:6])
    assert parking.bring(6)
    assert not parking.bring(6)
    assert memory.resident == set(free(pool))
    assert not parking.bring(6)


def test_no_pages_are_brought_for_blocks_that_are_parked_again(
    pool: BlockPool, memory: Memory
) -> None:
    parking = Parking(pool, BLOCK)
    parking.set_usable(0)
    parking.set_usable(10)
    parking.bring(4)
    parking.set_usable(3)
    while parking.bring(4):
        pass
    assert memory.resident == set(free(pool))
    assert len(memory.resident) == 3


def test_what_was_parked_is_parked_again_as_it_is(pool: BlockPool, memory: Memory) -> None:
    parking = Parking(pool, BLOCK)
    parking.set_usable(5)
    memory.resident = usable = set(free(pool))
    with parking.lifted():
        assert len(free(pool)) == BLOCKS
        assert pool.reset_prefix_cache()
    assert set(free(pool)) == usable == memory.resident
    assert parking.usable == 5
