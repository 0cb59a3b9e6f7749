"""Publish and follow through a real store: bit-exact whatever the schedule, whole or not at all."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.transfer import publisher as publishing
from rose.transfer import relay
from rose.transfer.errors import TransferError
from rose.transfer.layout import FRAME, Shard, part
from rose.transfer.manifest import Step
from rose.transfer.publisher import Publisher
from rose.transfer.store.base import StoreError
from rose.transfer.store.files import FileStore
from rose.transfer.subscriber import Subscriber

FRAMES_AHEAD = publishing.AHEAD * 2 * FRAME * 4
"""Bytes of bf16 frames being compared by one thread: new elements, and what they are coded into."""
SHAPES = {"embed": (70, 33), "norm": (33,), "scale": (), "up": (40, 33), "steps": (3,)}


def weights(rng: random.Random) -> dict[str, torch.Tensor]:
    torch.manual_seed(rng.randrange(10**6))
    made: dict[str, torch.Tensor] = {n: torch.randn(s) for n, s in SHAPES.items() if n != "steps"}
    made["steps"] = torch.arange(3)
    return made


def nudge(rng: random.Random, values: dict[str, torch.Tensor]) -> None:
    """An optimiser's step: some elements of some tensors, sometimes none, sometimes all."""
    share = rng.choice([0.0, 0.001, 0.02, 0.5, 1.0])
    for value in values.values():
        mask = torch.rand(value.shape) < share
        if value.is_floating_point():
            value[mask] += 0.1 * torch.randn(value.shape)[mask]


def wire(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """What receivers must have, bit for bit."""
    as_sent = {n: v.bfloat16() if v.is_floating_point() else v for n, v in values.items()}
    flat = {n: v.contiguous().reshape(-1) for n, v in as_sent.items()}
    return {n: v.view(torch.uint8).numpy().tobytes() for n, v in flat.items()}


def agree(host: Subscriber, publisher: Publisher, values: dict[str, torch.Tensor]) -> None:
    """The host comes to the publisher's version; a relay's list of versions may be a moment old."""
    deadline = time.monotonic() + 10 * relay.FRESH_S
    while host.update() != publisher.version and time.monotonic() < deadline:
        time.sleep(relay.FRESH_S)
    assert host.version == publisher.version
    assert got(host) == wire(values)


def got(subscriber: Subscriber) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in subscriber.copy.arrays.items()}


class World:
    """A trainer, a store, and hosts that come and go."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.values = weights(self.rng)
        self.store = FileStore(folder / "store", "job")
        self.publisher = self.new_publisher()
        self.hosts: dict[int, Subscriber] = {}

    def new_publisher(self) -> Publisher:
        return Publisher(self.store, anchor_every=6, threads=2, compress=self.rng.random() < 0.5)

    def publish(self) -> None:
        """In any order: a state dict and a module's parameters need not agree on one."""
        nudge(self.rng, self.values)
        names = self.rng.sample(list(self.values), len(self.values))
        self.publisher.publish({name: self.values[name] for name in names})
        self.publisher.settle()

    def restart_publisher(self) -> None:
        self.store.close()
        self.store = FileStore(self.folder / "store", "job")
        self.publisher = self.new_publisher()

    def host(self, number: int) -> Subscriber:
        if number not in self.hosts:
            self.hosts[number] = Subscriber(self.store, self.folder / f"host-{number}")
        return self.hosts[number]

    def update(self, number: int) -> None:
        host = self.host(number)
        assert host.update() == self.publisher.version
        if self.publisher.version is not None:
            assert got(host) == wire(self.values)

    def leave(self, number: int) -> None:
        if number in self.hosts:
            self.hosts.pop(number)


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.lists(st.sampled_from(["publish"] * 3 + ["update", "restart", "leave"]), max_size=40),
)
def test_every_host_has_the_trainers_bits_whatever_happened(
    tmp_path_factory: Any, seed: int, acts: list[str]
) -> None:
    world = World(tmp_path_factory.mktemp("world"), seed)
    for act in acts:
        number = world.rng.randrange(3)
        if act == "publish":
            world.publish()
        elif act == "update":
            world.update(number)
        elif act == "leave":
            world.leave(number)
        else:
            world.restart_publisher()
    for number in range(4):
        world.update(number)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, 7)


def test_history_stays_bounded_and_who_is_behind_takes_one_step(world: World) -> None:
    world.publish()
    world.update(0)
    for _ in range(40):
        world.publish()
    steps = world.store.steps()
    assert len(steps) < 30
    assert [s.version for s in steps if s.base is None] == [30, 36]
    assert Step(36, 40) in steps
    world.update(0)
    world.update(1)


def test_a_version_that_changed_nothing_says_so(world: World) -> None:
    world.publisher.publish(world.values)
    report = world.publisher.publish(world.values)
    assert str(report) == "version 1 changed nothing"
    assert report.stored == 0
    world.update(0)


def test_only_overlapping_frames_are_fetched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.transfer.layout.FRAME", 64)
    monkeypatch.setattr("rose.transfer.copy.FRAME", 64)
    monkeypatch.setattr("rose.transfer.publisher.FRAME", 64)
    monkeypatch.setattr("rose.transfer.weights.FRAME", 64)
    monkeypatch.setattr("rose.transfer.manifest.FRAME", 64)
    monkeypatch.setattr("rose.transfer.fetch.HOLE", 0)
    world.publish()
    half = [Shard("embed", part(SHAPES["embed"], 0, 0, 2), "embed")]
    host = Subscriber(world.store, world.folder / "half", half)
    read = []
    real = world.store.read
    monkeypatch.setattr(world.store, "read", lambda *a: read.append(a[4]) or real(*a))
    host.update()
    whole = sum(m.stored for m in world.store.manifests(Step(None, 0)))
    assert sum(read) < 0.4 * whole
    mine = host.copy.arrays["embed"][:35].tobytes()
    assert mine == wire(world.values)["embed"][: len(mine)]


# ---- faults


def buckets(world: World, version: int) -> list[Path]:
    return sorted(world.folder.glob(f"store/job/{version:010d}-*/rank-0/bucket-*"))


@pytest.mark.parametrize("fault", ["flip", "truncate", "missing"])
def test_a_damaged_bucket_changes_nothing_and_the_next_version_heals(
    world: World, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()
    world.update(0)
    before = got(world.host(0))
    world.values["up"] += 1.0
    world.publisher.publish(world.values)
    (bucket,) = buckets(world, 1)
    whole = bucket.read_bytes()
    if fault == "flip":
        bucket.write_bytes(whole[:-3] + bytes([whole[-3] ^ 4]) + whole[-2:])
    elif fault == "truncate":
        bucket.write_bytes(whole[:-1])
    else:
        bucket.unlink()
    read, steps = world.store.read, []
    monkeypatch.setattr(world.store, "read", lambda step, *a: steps.append(step) or read(step, *a))
    with pytest.raises((TransferError, StoreError), match=r"up|bucket-0"):
        world.host(0).update()
    assert set(steps) == {Step(0, 1)}, "an anchor cannot help against a damaged bucket"
    assert (world.host(0).version, got(world.host(0))) == (0, before)
    bucket.write_bytes(whole)
    world.update(0)


def test_a_publisher_killed_between_buckets_leaves_no_version(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()
    monkeypatch.setattr(publishing, "BUCKET", 1000)
    real = world.store.write

    def die(*args: Any) -> None:
        if args[2] == 1:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(world.store, "write", die)
    world.values["embed"] += 1.0
    world.values["up"] += 1.0
    with pytest.raises(KeyboardInterrupt):
        world.publisher.publish(world.values)
    assert list(world.store.steps()) == [Step(None, 0)]
    monkeypatch.undo()
    world.restart_publisher()
    world.publish()
    assert world.publisher.version == 1
    world.update(0)


def test_a_subscriber_killed_while_writing_does_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish()
    world.update(0)
    world.values["embed"] += 1.0
    world.values["up"] += 1.0
    world.publisher.publish(world.values)
    host = world.host(0)
    real = host.copy.apply

    def die(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(host.copy, "apply", die)
    with pytest.raises(KeyboardInterrupt):
        host.update()
    world.leave(0)
    with pytest.raises(TransferError, match="no whole version"):
        _ = world.host(0).copy
    world.publish()
    world.update(0)


def test_a_published_version_is_one_though_its_anchor_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(6):
        world.publish()
    real = world.store.seal

    def full(manifest: Any) -> None:
        if manifest.base is None:
            raise StoreError("No space left on device")
        real(manifest)

    monkeypatch.setattr(world.store, "seal", full)
    world.publish()
    assert "version 6 is published, but then: No space left" in caplog.text
    assert Step(None, 6) not in world.store.steps()
    world.update(0)
    monkeypatch.undo()
    for _ in range(6):
        world.publish()
    assert Step(None, 12) in world.store.steps()
    world.update(1)


def test_a_copy_that_rotted_is_made_anew(world: World) -> None:
    world.publish()
    world.update(0)
    world.host(0).copy.arrays["up"][3, 3] ^= 1
    world.values["up"] += 1.0
    world.publisher.publish(world.values)
    world.update(0)
    world.publish()
    world.update(0)
    left = {path.name for path in (world.folder / "host-0").iterdir()}
    assert left == {"state", "updating", "reading", world.host(0).copy.path.name}


def test_two_publishers_of_one_job(world: World) -> None:
    world.publish()
    other = Publisher(FileStore(world.folder / "store", "job"))
    with pytest.raises(StoreError, match="job job already has a publisher of rank 0"):
        other.publish(world.values)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.update(up=torch.zeros(2, 2)), r"up \(bfloat16, \(2, 2\)\)"),
        (lambda v: v.update(new=torch.zeros(2)), "new"),
        (lambda v: v.pop("up"), "up is missing"),
        (lambda v: v.update(up=v["up"].half()), "up"),
        (lambda v: v.update(up=v["up"].to(torch.complex64)), "complex64"),
    ],
)
def test_other_tensors_are_refused_by_name(world: World, change: Any, said: str) -> None:
    world.publish()
    values = dict(world.values)
    change(values)
    with pytest.raises((TransferError, TypeError), match=said):
        world.publisher.publish(values)
    assert list(world.store.steps()) == [Step(None, 0)]
    world.publish()
    world.update(0)


def test_versions_only_grow(world: World) -> None:
    world.publisher.publish(world.values, version=5)
    with pytest.raises(ValueError, match="version 5 is not newer than 5"):
        world.publisher.publish(world.values, version=5)


def test_a_version_that_has_no_folder_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="10000000000"):
        world.publisher.publish(world.values, version=10**10)
    assert world.store.steps() == {}


def test_several_ranks_make_one_version(tmp_path: Path) -> None:
    rng = random.Random(3)
    values = weights(rng)
    names = list(values)
    stores = [FileStore(tmp_path, "job") for _ in range(2)]
    ranks = [Publisher(store, rank=rank, ranks=2) for rank, store in enumerate(stores)]
    host = Subscriber(stores[0], tmp_path / "host")
    for _ in range(3):
        nudge(rng, values)
        ranks[0].publish({n: values[n] for n in names[:2]})
        seen = host.version
        assert host.update() == seen  # half of a version is none
        ranks[1].publish({n: values[n] for n in names[2:]})
        host.update()
        assert got(host) == wire(values)


def test_a_module_is_published_once_per_tied_tensor(world: World) -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    module["b"].weight = module["a"].weight
    report = world.publisher.publish(module)
    assert report.elements == 16 + 4 + 4


def test_names_of_jobs_stay_inside_the_folder(tmp_path: Path) -> None:
    for bad in ("..", "../x", "a/b", "", ".hidden", "x" * 65):
        with pytest.raises(ValueError, match="job"):
            FileStore(tmp_path, bad)


def test_publishing_needs_no_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the snapshot at most three buckets, also when everything changes."""
    monkeypatch.setattr(publishing, "BUCKET", 8 << 20)
    value = torch.zeros(32 << 20, dtype=torch.bfloat16)
    publisher = Publisher(FileStore(tmp_path, "job"), threads=1, compress=False)
    publisher.publish({"w": value})
    publisher.settle()
    value.view(torch.int16).add_(1)
    tracemalloc.start()
    try:
        report = publisher.publish({"w": value})
        publisher.settle()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.stored > 64 << 20
    assert peak < 3 * (8 << 20) + FRAMES_AHEAD
