"""Layouts and plans: every element is published once, and reassembles where it is needed."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.transfer import layout
from rose.transfer.layout import Box, Layout, LayoutError, Piece, Rank, Shape, Shard

FRAME = 32


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "FRAME", FRAME)


def view(array: np.ndarray, box: Box) -> np.ndarray:
    return array[(..., *(slice(start, stop) for start, stop in box))]


# ---- boxes

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@given(shapes, st.data())
def test_a_run_is_its_elements_in_order(shape: Shape, data: st.DataObject) -> None:
    elements = math.prod(shape)
    start = data.draw(st.integers(0, elements))
    stop = data.draw(st.integers(start, elements))
    array = np.arange(elements).reshape(shape)
    boxes = layout.run(shape, start, stop)
    found = [int(x) for box in boxes for x in view(array, box).reshape(-1)]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_the_difference_of_boxes_covers_the_rest_once(shape: Shape, data: st.DataObject) -> None:
    def some_box() -> Box:
        pairs = [
            sorted(data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape
        ]
        return tuple((a, max(b, a + 1)) for a, b in pairs)

    box, hole = some_box(), some_box()
    count = np.zeros(shape, int)
    for piece in layout.difference(box, hole):
        view(count, piece)[...] += 1
    expected = np.zeros(shape, int)
    view(expected, box)[...] = 1
    view(expected, hole)[...] = 0
    assert np.array_equal(count, expected)


# ---- random layouts


def random_shards(
    rng: random.Random, shapes: dict[str, Shape], ranks: int
) -> dict[Rank, list[Shard]]:
    """Every tensor sharded in one of the ways there are; all ranks together hold all of it."""
    held: dict[Rank, list[Shard]] = {rank: [] for rank in range(ranks)}
    for name, shape in shapes.items():
        elements = math.prod(shape)
        way = rng.choice(["replicated", "part", "stage", "flat", "fused"])
        divisible = [d for d, n in enumerate(shape) if n % ranks == 0]
        if way == "part" and divisible:
            dimension = rng.choice(divisible)
            for rank in held:
                box = layout.part(shape, dimension, int(rank), ranks)
                held[rank].append(Shard(name, box, f"{name}.local"))
        elif way == "stage":
            held[rng.randrange(ranks)].append(Shard(name, layout.whole(shape), name))
        elif way == "flat":
            cuts = sorted(rng.randint(0, elements) for _ in range(ranks - 1))
            for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, elements], strict=True)):
                held[rank] += layout.flat(name, shape, start, stop, f"{name}.flat", 0)
        elif way == "fused" and shape and shape[0] > 1:
            middle = rng.randrange(1, shape[0])
            rows = [
                ((0, middle), *layout.whole(shape[1:])),
                ((middle, shape[0]), *layout.whole(shape[1:])),
            ]
            for shards in held.values():
                shards += layout.fused(
                    f"{name}.fused", [(name, box) for box in rng.sample(rows, 2)]
                )
        else:
            for shards in held.values():
                shards.append(Shard(name, layout.whole(shape), name))
    return held


def store(shards: list[Shard], full: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A rank's own parameters, with what it holds of the full tensors."""
    local: dict[str, np.ndarray] = {}
    for shard in shards:
        end = shard.offset + layout.size(shard.box)
        have = local.get(shard.local, np.zeros(0, np.int64))
        local[shard.local] = np.concatenate([have, np.zeros(max(0, end - have.size), np.int64)])
        local[shard.local][shard.offset : end] = view(full[shard.tensor], shard.box).reshape(-1)
    return local


@given(st.integers(0, 10**9))
def test_every_element_is_published_once_and_reassembles_everywhere(seed: int) -> None:
    rng = random.Random(seed)
    shapes = {
        f"t{i}": tuple(rng.choice([1, 2, 4, 6, 8]) for _ in range(rng.randint(0, 3)))
        for i in range(rng.randint(1, 4))
    }
    full = {
        n: np.array(rng.sample(range(10**6), math.prod(s))).reshape(s) for n, s in shapes.items()
    }
    source = random_shards(rng, shapes, rng.choice([1, 2, 4]))
    target = random_shards(rng, shapes, rng.choice([1, 2, 4]))
    plan = layout.plan(shapes, source, target)

    count = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for rank, pieces in plan.publish.items():
        for piece in pieces:
            view(count[piece.tensor], piece.box)[...] += 1
            held = [s.box for s in source[rank] if s.tensor == piece.tensor]
            assert any(layout.intersection(piece.box, box) == piece.box for box in held)
    assert all((c == 1).all() for c in count.values())

    for rank, fetched in plan.fetch.items():
        seen = {name: np.full(shape, -1) for name, shape in shapes.items()}
        for piece, frames in fetched.items():
            flat = np.full(layout.size(piece.box), -1)
            elements = view(full[piece.tensor], piece.box).reshape(-1)
            for frame in frames:
                assert frame < piece.frames
                flat[frame * FRAME : (frame + 1) * FRAME] = elements[
                    frame * FRAME : (frame + 1) * FRAME
                ]
            view(seen[piece.tensor], piece.box)[...] = flat.reshape(
                view(seen[piece.tensor], piece.box).shape
            )
        wanted, got = store(list(target[rank]), full), store(list(target[rank]), seen)
        assert all(np.array_equal(wanted[local], got[local]) for local in wanted)


@given(st.integers(0, 10**9))
def test_no_frame_is_fetched_for_nothing(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 2, 3, 8, 40]) for _ in range(rng.randint(1, 3)))
    box = tuple((a := rng.randrange(n), rng.randint(a + 1, n)) for n in shape)
    piece = Piece("t", layout.whole(shape))
    plan = layout.plan({"t": shape}, {0: [Shard("t", piece.box, "t")]}, {0: [Shard("t", box, "x")]})
    mine = np.zeros(shape, bool)
    view(mine, box)[...] = True
    frames = [f for f in range(piece.frames) if mine.reshape(-1)[f * FRAME : (f + 1) * FRAME].any()]
    assert plan.fetch[0] == {piece: frames}


# ---- the ways there are, by name

LLAMA = {"q": (8, 4), "k": (4, 4), "v": (4, 4), "o": (4, 8), "norm": (4,), "embed": (16, 4)}


def tensor_parallel(rank: int, ranks: int) -> list[Shard]:
    rows = [(name, layout.part(LLAMA[name], 0, rank, ranks)) for name in ("q", "k", "v")]
    return [
        *layout.fused("qkv", rows),
        Shard("o", layout.part(LLAMA["o"], 1, rank, ranks), "o"),
        Shard("norm", layout.whole(LLAMA["norm"]), "norm"),
        Shard("lm_head", layout.part(LLAMA["embed"], 0, rank, ranks), "lm_head"),
        Shard("embed", layout.part(LLAMA["embed"], 0, rank, ranks), "embed"),
    ]


def test_fused_parameters_have_their_parts_one_after_the_other() -> None:
    assert [(s.local, s.offset) for s in tensor_parallel(1, 2)[:3]] == [
        ("qkv", 0),
        ("qkv", 16),
        ("qkv", 24),
    ]


def test_tied_embeddings_are_published_once() -> None:
    source: Layout = {0: [Shard(name, layout.whole(shape), name) for name, shape in LLAMA.items()]}
    target: Layout = {rank: tensor_parallel(rank, 2) for rank in range(2)}
    plan = layout.plan(LLAMA, source, target, aliases={"lm_head": "embed"})
    assert [p.tensor for p in plan.publish[0]] == list(LLAMA)
    assert plan.fetch[1][Piece("embed", ((0, 16), (0, 4)))] == [1]


def test_replicas_take_turns() -> None:
    shapes = {f"t{i}": (4, 4) for i in range(6)}
    source: Layout = {
        r: [Shard(n, layout.whole(s), n) for n, s in shapes.items()] for r in range(3)
    }
    plan = layout.plan(shapes, source, {0: []})
    assert [len(pieces) for pieces in plan.publish.values()] == [2, 2, 2]


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ({0: [Shard("x", ((0, 1),), "x")]}, {}, "0 holds x, which is not a known tensor"),
        ({0: [Shard("t", ((0, 1),), "t")]}, {}, "t, which is"),
        ({0: [Shard("t", ((0, 5), (0, 2)), "t")]}, {}, "t, which is"),
        (
            {0: []},
            {7: [Shard("t", ((0, 4), (0, 2)), "t")]},
            "nobody publishes all of t that 7 needs",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(source: Layout, target: Layout, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        layout.plan({"t": (4, 2)}, source, target)


def test_parts_must_be_equal_and_runs_inside() -> None:
    with pytest.raises(LayoutError, match="5 cannot be cut into 2"):
        layout.part((4, 5), 1, 0, 2)
    with pytest.raises(LayoutError, match="elements 3 to 9"):
        layout.run((4, 2), 3, 9)
