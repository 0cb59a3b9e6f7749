from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.executor.page import Page


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    made = Page.create(tmp_path / "page", kv_total=1 << 30, device="cpu0")
    yield made
    made.close()


@pytest.fixture
def lasting_page(tmp_path: Path) -> Page:
    """For threads that listen to its bells for as long as this process lives."""
    return Page.create(tmp_path / "page", kv_total=1 << 30, device="cpu0")
