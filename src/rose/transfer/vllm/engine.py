"""vLLM's weight-transfer backend `rose`, in every worker of an engine.

    init      where the store is, and a folder for this host's copy
    update    {"version": N}: wait until it is staged on this rank; {"give_up": true} ends a failed
              update on all ranks
    finish    write it: the engine should be paused (`keep`) from before `update` until after this

Fetching and staging go on in the background from `init` on, see `follower`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.transfer.copy import read_state
from rose.transfer.errors import TransferError
from rose.transfer.manifest import Tensor
from rose.transfer.store import open_store
from rose.transfer.store.base import Store
from rose.transfer.subscriber import Subscriber, newest_tensors
from rose.transfer.vllm import placement
from rose.transfer.vllm.follower import Follower
from rose.transfer.vllm.staging import Live


@dataclass
class InitInfo(WeightTransferInitInfo):
    store: str
    """As `rose.transfer.store.open_store` takes it; a relay's, usually."""
    job: str
    folder: str
    """Of the host's copy. Engines of one host that want the same slices share it."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int = -1
    wait_s: float = 60.0
    give_up: bool = False


class RoseEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        eager = self.model_config.enforce_eager
        if self.device.type == "cpu" and not eager:
            raise ValueError(
                "weight transfer backend rose: on CPUs engines need --enforce-eager, as compiled "
                "graphs keep the kernels they were made with"
            )
        self._store: Store | None = None
        self._follower: Follower | None = None
        self._source: InitInfo | None = None
        self._live: Live | None = None
        self._tensors: dict[str, Tensor] = {}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Again with other words: the old store and folder are left."""
        self.shutdown()
        store = self._store = open_store(init_info.store, init_info.job)
        folder = Path(init_info.folder) / self._slices()
        options = dict((self.vllm_config.additional_config or {}).get("rose", {}))
        self._follower = Follower(lambda: self._open(store, folder), options.get("host_cores", ()))
        self._source = init_info

    def start_weight_update(self) -> None:
        """Nothing to do: all is staged, or will be."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.give_up:
            self.following.disarm()
            raise TransferError("the update was given up")
        self.following.arm(update_info.version, update_info.wait_s)

    def finish_weight_update(self) -> None:
        self.following.commit()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        if self._store is not None:
            self._store.close()  # it would insist on being answered
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def status(self, wanted: int | None) -> dict[str, Any]:
        status = self.following.status(wanted)
        assert self._source is not None
        return status | {"store": self._source.store, "job": self._source.job}

    def digests(self) -> list[Any]:
        """Of every slice in the live model; the engine should be paused."""
        if self._live is None:
            raise TransferError("no version was staged yet")
        return self._live.digests(self._tensors)

    @property
    def following(self) -> Follower:
        if self._follower is None:
            raise TransferError("init_weight_transfer_engine was not called")
        return self._follower

    def _open(self, store: Store, folder: Path) -> tuple[Subscriber, Live] | None:
        """From the host's copy if there is one: an engine restarts also while the store is away."""
        state = read_state(folder) if folder.exists() else None
        tensors = state.tensors if state is not None else newest_tensors(store)
        if not tensors:
            return None
        with set_current_vllm_config(self.vllm_config):
            places = placement.find(self.vllm_config, tensors)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._live = live = Live(self.model, places)
        shards = None
        if self.parallel_config.world_size > 1:
            shards = [one.shard for parts in places.placed.values() for one in parts]

        return Subscriber(store, folder, shards), live

    def _slices(self) -> str:
        """Folder of this rank's slices: none of its own if it has everything."""
        config = self.parallel_config
        if config.world_size == 1:
            return ""
        from vllm.distributed import get_pp_group, get_tp_group

        tp, pp = get_tp_group(), get_pp_group()
        return f"tp{tp.rank_in_group}of{tp.world_size}-pp{pp.rank_in_group}of{pp.world_size}"
