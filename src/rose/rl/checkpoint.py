"""What a trainer needs to go on after it was killed: one file, whole or not there."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FILE = "checkpoint.pt"


@dataclass
class Progress:
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Names this run's turns: another run asks for others, the same one for the same again."""
    step: int = 0
    """Steps done."""
    first_version: int | None = None
    """Of the policy before the first step; a step's policy is as many versions further."""

    told: dict[str, Any] | None = None
    """Facts of the last step, of which the weights may not be sent yet."""

    @property
    def version(self) -> int:
        assert self.first_version is not None
        return self.first_version + self.step


def save(folder: Path, progress: Progress, model: Any, optimiser: Any) -> None:
    content = {
        "progress": vars(progress),
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
    }
    staged = folder / f".{FILE}"
    with staged.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    staged.rename(folder / FILE)


def load(folder: Path, model: Any, optimiser: Any) -> Progress:
    """Where the run in this folder is, with model and optimiser as they were then."""
    path = folder / FILE
    if not path.exists():
        return Progress()
    content = torch.load(path, weights_only=True)
    model.load_state_dict(content["model"])
    optimiser.load_state_dict(content["optimiser"])
    return Progress(**content["progress"])
