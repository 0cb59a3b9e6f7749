"""What `--additional-config '{"rose": {...}}'` tells an engine. Unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rose.executor.slo import Slo
from rose.executor.working_set import LOSS


class DeviceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Both engines of a device."""

    device: str
    page: str
    kv_total: int
    """Bytes of physical KV memory that the two engines share."""
    profile: str
    """Path of this engine's latency profile (`rose profile`)."""
    headroom: float = 0.2
    prefix_loss: float = LOSS
    """Share of the tokens found in an engine's prefix cache that the other one may cost it; 1 keeps
    no prefix for its sake."""
    device_cores: tuple[int, ...] = ()
    """CPU devices: the cores that compute. Empty: no pinning."""
    host_cores: tuple[int, ...] = ()
    """CPU devices: the cores for everything else."""


class ServingOptions(DeviceOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    ttft_ms: float
    tpot_ms: float
    credit_ms: float = 2000.0
    """Most lead of a request that may be lent: bounds the longest stall a reader can see."""
    slo_margin: float = 0.1
    """Share of each promise kept for what the engine cannot see: HTTP, tokeniser, network."""

    @property
    def promise(self) -> Slo:
        return Slo(self.ttft_ms / 1000.0, self.tpot_ms / 1000.0)

    def lendable(self, promise: Slo) -> Slo:
        """The part of the promise that rollouts may use up."""
        keep = 1.0 - self.slo_margin
        return Slo(promise.ttft_s * keep, promise.tpot_s * keep)


class RolloutOptions(DeviceOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    dedicated: bool = False
    """No serving engine shares this device."""


O = TypeVar("O", bound=DeviceOptions)  # noqa: E741


def options_from(additional_config: Any, kind: type[O]) -> O:
    try:
        return msgspec.convert(dict(additional_config)["rose"], kind)
    except KeyError:
        raise ValueError("--additional-config needs a 'rose' object; see docs/sre.md") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"--additional-config rose: {error}") from error


def profile_path(options: DeviceOptions) -> Path:
    return Path(options.profile)
