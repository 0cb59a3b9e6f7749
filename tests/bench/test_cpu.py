"""Who used the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rose.bench.cpu import Counting, Spent
from rose.executor.page import Page

BUSY = "for _ in range(20_000_000): pass"


def test_time_of_those_who_give_way_is_told_apart(tmp_path: Path) -> None:
    page = Page.create(tmp_path / "page", kv_total=1, device="cpu:0")
    spent = Spent()
    counting = Counting(spent, page, page, os.getpid())
    counting.look()
    subprocess.run(["nice", "-n", "10", sys.executable, "-c", BUSY], check=True)
    counting.look()
    assert 0.1 < spent.nice <= spent.everything
