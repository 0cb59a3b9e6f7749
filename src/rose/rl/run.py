"""A training run's file. Unknown keys and impossible values are refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from rose import models
from rose.cluster.config import ConfigError, Strict, read
from rose.rl import environments


class Train(Strict):
    algorithm: Literal["grpo", "dapo"] = "grpo"
    steps: int = Field(50, ge=1)
    tasks: int = Field(16, ge=1)
    """Prompts of a step."""
    samples: int = Field(8, ge=2)
    """Episodes of each, a group."""
    learned: int = Field(0, ge=0)
    """Episodes of each group to learn from, those whose rewards differ most; 0: all."""
    learning_rate: float = Field(1e-6, gt=0)
    minibatches: int = Field(1, ge=1)
    layers: int = Field(0, ge=0)
    """Learn only the last so many layers and what follows them; 0: all."""
    off_policy: bool = False
    """Sample the next step while learning from this one: one version behind."""
    most_sampled: float = Field(5.0, ge=1)
    """DAPO samples at most so many times the tasks of a step."""
    checkpoint_every: int = Field(1, ge=1)
    threads: int = Field(0, ge=0)
    """That learn, each from episodes of its own and with gradients of its own; 0: all cores that
    the process may use work on the same batch."""
    cores: tuple[int, ...] = ()
    """That the trainer keeps to while it learns; all if empty."""
    idle: bool = False
    """Learn only while nobody else wants those cores (`SCHED_IDLE`): for a trainer that shares
    them with serving."""


class Episodes(Strict):
    environment: str
    options: dict[str, Any] = Field({})
    """Of the environment."""
    turns: int = Field(16, ge=1)
    turn_tokens: int = Field(64, ge=1)
    context: int = Field(1024, ge=16)
    in_flight: int = Field(256, ge=1)

    @field_validator("environment")
    @classmethod
    def _known(cls, value: str) -> str:
        environments.check(value, {})
        return value


class Evaluation(Strict):
    tasks: int = Field(0, ge=0)
    """Held-out ones that are played before the first and after the last step."""


class RunConfig(Strict):
    """`store` is what the publisher writes to, `weights` where engines fetch from."""

    name: str = Field(pattern=r"^[\w.-]+$")
    model: str
    out: Path
    scheduler: str = "http://127.0.0.1:8400"
    job: str = "default"
    """At the scheduler and in the store."""
    store: str
    weights: str
    wire: Literal["bfloat16", "float32"] = "bfloat16"
    """float32: engines that compute in float32 get exactly the trainer's weights."""
    seed: int = Field(0, ge=0, lt=2**31)
    train: Train = Train()
    episodes: Episodes
    evaluation: Evaluation = Evaluation()

    @field_validator("model")
    @classmethod
    def _model_exists(cls, value: str) -> str:
        if value not in models.MAKERS:
            models.resolve(value)
        return value


def load(path: Path) -> RunConfig:
    config = read(path, RunConfig)
    check(config, str(path))
    return config


def check(config: RunConfig, source: str) -> None:
    """What a field alone does not show, before anything starts."""
    try:
        environments.check(config.episodes.environment, config.episodes.options)
    except ValueError as error:
        raise ConfigError(f"{source}: episodes: {error}") from error
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{source}: out: {config.out}: {error.strerror}") from error
    if not os.access(config.out, os.W_OK):
        raise ConfigError(f"{source}: out: {config.out} is not writable")
    outside = set(config.train.cores) - os.sched_getaffinity(0)
    if outside:
        raise ConfigError(f"{source}: train.cores: this process may not use {sorted(outside)}")
