from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.executor.page import Page


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page.create(tmp_path / "page", kv_total=1 << 30, device="cpu0")
    yield made
    made.close()
