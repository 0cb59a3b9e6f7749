from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rose.models import make_tiny
from rose.models.player import TEMPLATE
from rose.models.tiny import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer(512, TEMPLATE)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", hidden=64, kv_heads=1)
