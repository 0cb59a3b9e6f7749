"""What engines hold, as far as is known."""

from __future__ import annotations

import random

from rose.scheduler.prefixes import BLOCK, Prefixes, chain


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(30_000) for _ in range(count)]


def test_a_chain_is_whole_blocks_of_a_prompt_under_a_salt() -> None:
    prompt = tokens(3 * BLOCK + 5)
    assert len(chain(prompt, "w1")) == 3
    assert chain(prompt[: 2 * BLOCK], "w1") == chain(prompt, "w1")[:2]
    assert not set(chain(prompt, "w1")) & set(chain(prompt, "w2"))
    changed = [prompt[0] + 1, *prompt[1:]]
    assert not set(chain(prompt, "w1")) & set(chain(changed, "w1"))


def test_the_longest_shared_prefix_is_found() -> None:
    known, prompt = Prefixes(), tokens(4 * BLOCK)
    known.hold("a", chain(prompt, ""), 10_000)
    known.hold("b", chain(prompt[: 2 * BLOCK], ""), 10_000)
    longer = prompt + tokens(BLOCK, seed=1)
    assert known.cached(chain(longer, "")) == {"a": 4 * BLOCK, "b": 2 * BLOCK}
    assert known.cached(chain(tokens(4 * BLOCK, seed=2), "")) == {}


def test_the_longest_unused_is_forgotten_first_from_its_end() -> None:
    known = Prefixes()
    first, second = chain(tokens(4 * BLOCK), ""), chain(tokens(4 * BLOCK, seed=1), "")
    known.hold("a", first, 6 * BLOCK)
    known.hold("a", second, 6 * BLOCK)
    assert known.cached(first) == {"a": 2 * BLOCK}
    assert known.cached(second) == {"a": 4 * BLOCK}


def test_an_engine_that_is_gone_holds_nothing() -> None:
    known, names = Prefixes(), chain(tokens(2 * BLOCK), "")
    known.hold("a", names, 10_000)
    known.hold("b", names, 10_000)
    known.forget("a")
    assert known.cached(names) == {"b": 2 * BLOCK}
    known.forget("b")
    assert known._holders == {}


def test_an_engine_that_forgets_more_than_thought_is_believed_to_hold_less() -> None:
    known, names = Prefixes(), chain(tokens(8 * BLOCK), "")
    for _ in range(10):
        known.correct("a", 8 * BLOCK, 0)
    known.hold("a", names, 8 * BLOCK)
    assert known.cached(names).get("a", 0) < 4 * BLOCK
