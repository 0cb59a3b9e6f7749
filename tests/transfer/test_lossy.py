"""`topk`: the largest changes first, the rest later, and nothing held back that cannot wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rose.transfer.publisher import Publisher
from rose.transfer.store.files import FileStore
from rose.transfer.subscriber import Subscriber


def test_topk_sends_the_largest_changes_and_the_rest_later(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", "job")
    publisher = Publisher(store, lossy_topk=0.1, threads=1)
    host = Subscriber(store, tmp_path / "host")
    value = torch.zeros(100)
    publisher.publish({"w": value})
    value += torch.arange(1, 101) / 128
    sent = []
    for _ in range(10):
        sent.append(publisher.publish({"w": value}).changed)
        host.update()
        here = torch.from_numpy(host.copy.arrays["w"].view("i2")).view(torch.bfloat16).float()
        behind = here != value.bfloat16().float()
        assert not behind[100 - 10 * len(sent) :].any()
        assert behind[: 100 - 10 * len(sent)].all()
    assert sent == [10] * 10
    assert publisher.publish({"w": value}).changed == 0


def test_topk_holds_back_no_integers_and_nothing_that_is_no_number(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", "job")
    publisher = Publisher(store, lossy_topk=0.02, threads=1)
    values = {"w": torch.zeros(100), "steps": torch.zeros(100, dtype=torch.int64)}
    publisher.publish(values)
    values["steps"] += 1
    values["w"] += 1.0
    values["w"][3:8] = torch.tensor([float("nan"), float("inf"), -float("inf"), 9.0, 8.0])
    publisher.publish(values)
    host = Subscriber(store, tmp_path / "host")
    host.update()
    assert (host.copy.arrays["steps"] == 1).all()
    here = torch.from_numpy(host.copy.arrays["w"].view("i2")).view(torch.bfloat16)
    assert torch.equal(here.nonzero().squeeze(1), torch.tensor([3, 4, 5]))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_topk_is_a_share(tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match="lossy_topk"):
        Publisher(FileStore(tmp_path, "job"), lossy_topk=share)
