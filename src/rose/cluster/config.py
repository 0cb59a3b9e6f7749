"""The node's TOML file. Unknown keys and impossible values are refused in one sentence."""

from __future__ import annotations

import os
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rose import models
from rose.cluster.device import Device, parse_device
from rose.executor.admission import RULES
from rose.executor.facts import MAX_SECONDS
from rose.executor.latency import Profile, Step
from rose.executor.working_set import LOSS
from rose.net import is_loopback

Port = Annotated[int, Field(ge=0, le=65535)]
M = TypeVar("M", bound=BaseModel)
ENGINE_OVERHEAD = 700 << 20
"""Resident bytes of a vLLM CPU process beside weights and KV (imports, buffers), measured."""


class ConfigError(Exception):
    """One sentence that names the field or file."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EngineConfig(Strict):
    model: str
    port: Port = 0
    """0 picks a free port."""
    dtype: str = "auto"
    """auto: float32 on CPU devices (see docs/architecture.md), the model's own elsewhere."""
    max_model_len: int = Field(2048, ge=16)
    max_seqs: int = Field(32, ge=1)
    block_size: int = Field(32, ge=1)
    args: list[str] = []
    """Further vLLM options, passed on unchanged."""

    @field_validator("model")
    @classmethod
    def _model_exists(cls, value: str) -> str:
        if value not in models.MAKERS:
            models.resolve(value)
        return value


class ServingConfig(EngineConfig):
    ttft_ms: float = Field(gt=0)
    tpot_ms: float = Field(gt=0)
    credit_ms: float = Field(2000.0, ge=0)
    slo_margin: float = Field(0.1, ge=0, lt=1)
    error_budget: float = Field(0.005, ge=0, lt=1)
    """Share of requests that lending may make late where the device cannot preempt rollouts."""
    attach: str | None = None
    """URL of a serving engine that runs with rose's options already: watched, never started."""


class RolloutConfig(EngineConfig):
    rule: str = "rose"
    preemption: Literal["auto", "idle", "none"] = "auto"
    memory_policy: Literal["trim", "aimd", "halve_and_freeze"] = "trim"

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, value: str) -> str:
        if value not in RULES:
            raise ValueError(f"is {value!r}, must be one of {', '.join(RULES)}")
        return value


class NodeConfig(Strict):
    device: str = "cpu:0"
    kv_gb: float = Field(1.0, gt=0)
    """Physical KV memory that the engines of the device share."""
    headroom: float = Field(0.2, ge=0, lt=1)
    prefix_loss: float = Field(LOSS, ge=0, le=1)
    """Share of serving's prefix-cache hits (tokens) that lending may cost; 1 keeps no prefixes."""
    page: Path | None = None
    host: str = "127.0.0.1"
    port: Port = 8300
    secret: str | None = None
    scheduler: str | None = None
    """URL of a `rose scheduler` that this device reports to, and may be borrowed by."""
    scheduler_secret: str | None = None
    lease_s: float = Field(60.0, gt=0)
    """A device that gets no answer of its scheduler for so long is no longer lent."""
    log_dir: Path = Path("rose-logs")
    restart_rollout: bool = True
    serving: ServingConfig | None = None
    """None: a dedicated rollout device."""
    rollout: RolloutConfig

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        parse_device(value)
        return value

    @model_validator(mode="after")
    def _safe(self) -> NodeConfig:
        if not is_loopback(self.host) and not self.secret:
            raise ValueError(f"host {self.host} is not loopback: set `secret`")
        return self

    @property
    def kv_total(self) -> int:
        return int(self.kv_gb * (1 << 30))

    @cached_property
    def where(self) -> Device:
        return parse_device(self.device)

    @property
    def page_path(self) -> Path:
        return self.page or Path(f"/dev/shm/rose-{self.device.replace(':', '')}-{os.getuid()}")


def load(path: Path) -> NodeConfig:
    return read(path, NodeConfig)


def parse(content: dict[str, Any], source: str) -> NodeConfig:
    return validated(content, source, NodeConfig)


def read(path: Path, kind: type[M]) -> M:
    """A file that a person wrote."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    return validated(content, str(path), kind)


def validated(content: dict[str, Any], source: str, kind: type[M]) -> M:
    """Or one sentence on the first thing that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "file"
        message = str(first["msg"]).removeprefix("Value error, ")
        raise ConfigError(f"{source}: {field}: {message}") from error


def check_fits(config: NodeConfig) -> None:
    """Refuse models that cannot live beside each other in this host's memory."""
    if config.where.gpu is not None:
        return
    engines = {"serving": config.serving, "rollout": config.rollout}
    needed = config.kv_total
    parts = [f"kv_gb {config.kv_gb:g} GiB"]
    for name, engine in engines.items():
        if engine is None or (isinstance(engine, ServingConfig) and engine.attach):
            continue
        try:
            weights = models.weight_bytes(models.resolve(engine.model), engine.dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}.model: {error}") from error
        needed += weights + ENGINE_OVERHEAD
        parts.append(f"{name}.model {weights / (1 << 30):.1f} GiB")
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"kv_gb and the models do not fit on {config.device}: {', '.join(parts)} and "
            f"{ENGINE_OVERHEAD >> 20} MiB per engine need {needed / (1 << 30):.1f} GiB, "
            f"{available / (1 << 30):.1f} GiB are available"
        )


def check_slo(ttft_ms: float, tpot_ms: float, slo_margin: float, profile: Profile) -> None:
    """Refuse promises that the engine cannot keep even when it is alone."""
    best_first = profile.mean(Step(1, 0, 0)) * 1e3
    best_next = profile.mean(Step(0, 1, 1)) * 1e3
    for field, promised, best in (
        ("serving.ttft_ms", ttft_ms, best_first),
        ("serving.tpot_ms", tpot_ms, best_next),
    ):
        if not promised <= MAX_SECONDS * 1e3:
            raise ConfigError(f"{field} must be a number of at most {MAX_SECONDS * 1e3:g} ms")
        if promised * (1 - slo_margin) < best:
            raise ConfigError(
                f"{field} of {promised:g} ms is impossible: the profile's best case is "
                f"{best:.0f} ms, and slo_margin keeps {slo_margin:.0%} of the promise back"
            )
