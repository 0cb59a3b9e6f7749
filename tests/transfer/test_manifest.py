"""Manifests come from another cluster: whatever they say, nothing is used that cannot be true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rose.transfer import manifest as manifests
from rose.transfer.errors import TransferError
from rose.transfer.manifest import (
    FRAMES,
    MAGIC,
    Bucket,
    Manifest,
    ManifestError,
    Part,
    Step,
    Tensor,
    digest,
)
from rose.transfer.publisher import Publisher
from rose.transfer.store.base import StoreError
from rose.transfer.store.files import FileStore
from rose.transfer.subscriber import Subscriber


@pytest.fixture(scope="module")
def published(tmp_path_factory: Any) -> Manifest:
    store = FileStore(tmp_path_factory.mktemp("store"), "job")
    Publisher(store, threads=1).publish({"w": torch.randn(30, 7), "b": torch.randn(7)})
    (found,) = store.manifests(Step(None, 0))
    return found


def sealed(body: bytes) -> bytes:
    return body + digest(body)


def rows(*each: tuple[int, int, int]) -> bytes:
    return np.array([(*row, b"") for row in each], FRAMES).tobytes()


def test_a_manifest_says_the_same_when_read_back(published: Manifest) -> None:
    assert manifests.decode(manifests.encode(published)) == published


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"job": "../up"}, "impossible name of a job"),
        ({"version": -1}, "impossible number of a version"),
        ({"version": 10**11}, "impossible number of a version"),
        ({"base": 0}, "base 0"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"ranks": 1 << 30}, "rank 0 of"),
        ({"tensors": [Tensor("w", "bfloat16", (30, 7))] * 2}, "listed twice"),
        ({"tensors": [Tensor("w", "bfloat32", (30, 7))]}, "w has unknown dtype 'bfloat32'"),
        ({"tensors": [Tensor("w", "bfloat16", (0, 7))]}, r"w has shape \(0, 7\)"),
        ({"tensors": [Tensor("w", "bfloat16", (1 << 50, 7))]}, "w has shape"),
        ({"parts": [Part(7, ((0, 1),), 0)]}, "a piece of tensor 7"),
        ({"parts": [Part(0, ((0, 31), (0, 7)), 0)]}, "is not in w"),
        ({"parts": [Part(0, ((5, 5), (0, 7)), 0)]}, "is not in w"),
        ({"parts": [Part(0, ((0, 30),), 0)]}, "is not in w"),
        ({"parts": [Part(0, ((0, 30), (0, 7)), 3)]}, "frames of w begin at 3"),
        ({"frames": b"torn"}, "a torn table"),
        ({"frames": rows((0, 0, 1))}, "1 frames instead of 2"),
        ({"frames": rows((0, 0, 1), (9, 0, 1))}, "a bucket"),
        ({"frames": rows((0, 0, 1), (0, 4_000_000_000, 1))}, "past the end of its bucket"),
        ({"frames": rows((0, 0, 1), (0, 0, 4_000_000_000))}, "past the end of its bucket"),
        ({"buckets": [Bucket(-5, b"")]}, "bucket"),
    ],
)
def test_lies_are_refused_by_name(published: Manifest, lie: dict[str, Any], said: str) -> None:
    lying = manifests.encode(replace(published, **lie))
    with pytest.raises(ManifestError, match=said):
        manifests.decode(lying)


@given(st.binary(max_size=300))
def test_noise_is_no_manifest(noise: bytes) -> None:
    for data in (noise, MAGIC + noise, sealed(MAGIC + noise), sealed(noise)):
        with pytest.raises(ManifestError):
            manifests.decode(data)


@given(data=st.data())
def test_a_changed_manifest_is_refused_or_says_what_can_be_true(
    published: Manifest, data: st.DataObject
) -> None:
    """Also when the checksum is made anew: an attacker can do that."""
    fields = msgspec.to_builtins(published)
    name = data.draw(st.sampled_from(sorted(fields)))
    junk = st.none() | st.integers() | st.text(max_size=9) | st.binary(max_size=60) | st.floats()
    fields[name] = data.draw(junk | st.lists(junk, max_size=4))
    body = sealed(MAGIC + msgspec.msgpack.encode(fields))
    try:
        accepted = manifests.decode(body)
    except ManifestError:
        return
    table = accepted.table()
    assert (table["bucket"] < max(1, len(accepted.buckets))).all()
    for part in accepted.parts:
        shape = accepted.tensors[part.tensor].shape
        assert all(0 <= a < b <= n for (a, b), n in zip(part.box, shape, strict=True))


def test_a_tensor_that_the_receiver_does_not_know_is_named(tmp_path: Path) -> None:
    """Two jobs' steps in one folder, as a confused or hostile publisher could leave them."""
    store = FileStore(tmp_path / "store", "job")
    publisher = Publisher(store, threads=1)
    publisher.publish({"w": torch.zeros(8)})
    host = Subscriber(store, tmp_path / "host")
    host.update()
    publisher.publish({"w": torch.ones(8)})
    (delta,) = store.manifests(Step(0, 1))
    for tensor in (Tensor("v", "bfloat16", (8,)), Tensor("w", "bfloat16", (2, 4))):
        box = tuple((0, n) for n in tensor.shape)
        store.seal(replace(delta, tensors=[tensor], parts=[Part(0, box, 0)]))
        with pytest.raises(TransferError, match=f"{tensor.name} as bfloat16"):
            host.update()
        assert host.version == 0
    store.seal(replace(delta, job="other"))
    with pytest.raises(StoreError, match="of job other"):
        store.manifests(Step(0, 1))
    store.seal(delta)
    assert host.update() == 1
