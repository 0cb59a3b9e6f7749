"""Bad input to `rose node`: one sentence naming the field or file, exit code 2, nothing left."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rose.cluster.config import ConfigError
from rose.cluster.engine import bound, free_port

GOOD: dict[str, str] = {
    "device": '"cpu:0"',
    "kv_gb": "0.0625",
    "port": "0",
    "serving.model": '"tiny-a"',
    "serving.ttft_ms": "500",
    "serving.tpot_ms": "100",
    "rollout.model": '"tiny-b"',
}


def toml(page: Path, changes: dict[str, str]) -> str:
    values = {"page": f'"{page}"', "log_dir": f'"{page}-logs"'} | GOOD | changes
    top = [f"{key} = {value}" for key, value in values.items() if "." not in key]
    for table in ("serving", "rollout"):
        top.append(f"[{table}]")
        keys = [key for key in values if key.startswith(f"{table}.")]
        top += [f"{key.partition('.')[2]} = {values[key]}" for key in keys]
    return "\n".join(top) + "\n"


Refuse = Callable[[str | None], str]


@pytest.fixture
def refuse(rose_home: Path, tmp_path: Path) -> Refuse:
    """Run `rose node` on a file with this content; the one sentence it ends with."""
    file = tmp_path / "node.toml"

    def run(content: str | None) -> str:
        if content is not None:
            file.write_text(content)
        ended = subprocess.run(
            [sys.executable, "-m", "rose.cli", "node", str(file)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 2, ended.stderr
        said = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
        assert len(said) == 1, ended.stderr
        assert said[0].startswith("rose: ")
        assert not _children(tmp_path), "it left a process behind"
        assert sorted(p.name for p in tmp_path.iterdir()) in ([], [file.name])
        return said[0]

    return run


def _children(folder: Path) -> list[psutil.Process]:
    """Processes that mention our file or page."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.pid != os.getpid():
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"colour": '"red"'}, "colour"),
        ({"rollout.colour": '"red"'}, "rollout.colour"),
        ({"device": '"tpu:0"'}, "device.*tpu:0"),
        ({"device": '"cpu:999"'}, "device.*cpu:999"),
        ({"headroom": "1.5"}, "headroom"),
        ({"headroom": "-0.1"}, "headroom"),
        ({"kv_gb": "0"}, "kv_gb"),
        ({"kv_gb": "10000"}, "kv_gb.*fit"),
        ({"kv_gb": "inf"}, "kv_gb"),
        ({"kv_gb": "nan"}, "kv_gb"),
        ({"serving.ttft_ms": "1"}, "serving.ttft_ms.*impossible"),
        ({"serving.tpot_ms": "1"}, "serving.tpot_ms.*impossible"),
        ({"serving.ttft_ms": "-5"}, "serving.ttft_ms"),
        ({"serving.ttft_ms": '"soon"'}, "serving.ttft_ms"),
        ({"serving.model": '"/no/such/folder"'}, "serving.model.*/no/such/folder"),
        ({"rollout.model": '"no-such-model"'}, "rollout.model.*no-such-model"),
        ({"rollout.rule": '"generous"'}, "rollout.rule.*generous"),
        ({"rollout.preemption": '"hope"'}, "rollout.preemption"),
        ({"rollout.memory_policy": '"greedy"'}, "rollout.memory_policy"),
        ({"host": '"0.0.0.0"'}, "host 0.0.0.0.*secret"),
        ({"port": "70000"}, "port"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if type(value) is dict else "",
)
def test_bad_values(refuse: Refuse, tmp_path: Path, changes: dict[str, str], names: str) -> None:
    assert re.search(names, refuse(toml(tmp_path / "page", changes)))


def test_a_file_that_is_not_there(refuse: Refuse) -> None:
    assert "node.toml: No such file" in refuse(None)


def test_a_file_that_is_not_toml(refuse: Refuse) -> None:
    assert "node.toml" in refuse("device = = cpu\n")


def test_a_file_without_a_rollout_engine(refuse: Refuse) -> None:
    assert "rollout" in refuse('device = "cpu:0"\n')


@pytest.mark.parametrize("field", ["port", "serving.port", "rollout.port"])
def test_a_port_in_use(refuse: Refuse, tmp_path: Path, field: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refuse(toml(tmp_path / "page", {field: str(port)}))
    assert re.search(rf"{re.escape(field)} {port} is in use", said)


def test_a_page_that_is_somebody_elses_file(refuse: Refuse, tmp_path: Path) -> None:
    other = tmp_path / "node.toml"  # the mistake that is easiest to make
    said = refuse(toml(other, {}))
    assert re.search(r"page .*node\.toml is not a rose control page", said)
    assert other.read_text().startswith("page")


def test_a_damaged_profile(refuse: Refuse, rose_home: Path, tmp_path: Path) -> None:
    from rose.cluster import profiles

    path = profiles.path_for("tiny-a", "auto", "cpu:0")
    good = path.read_text()
    path.write_text("{}")
    try:
        assert path.name in refuse(toml(tmp_path / "page", {}))
    finally:
        path.write_text(good)


def test_a_port_is_held_until_its_server_listens() -> None:
    with bound(0, "port") as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"serving.port {taken} is in use"):
            free_port(taken, "serving.port")
    assert free_port(taken, "serving.port") == taken
