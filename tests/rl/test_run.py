"""A run's file: what is wrong is said in one sentence before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rose.cli import app
from rose.cluster.config import ConfigError
from rose.rl import run

GOOD = """
name = "try"
model = "tiny-a"
out = "{folder}/out"
store = "file://{folder}/store"
weights = "tcp://127.0.0.1:1"
[episodes]
environment = "frozen_lake"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text.format(folder=folder))
    return path


def test_a_good_file_has_sensible_defaults(tmp_path: Path) -> None:
    config = run.load(write(tmp_path, GOOD))
    assert (config.job, config.train.algorithm, config.wire) == ("default", "grpo", "bfloat16")
    assert config.out.is_dir()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('model = "tiny-a"', 'model = "/nowhere/at/all"', "model: /nowhere/at/all is not a model"),
        ('"frozen_lake"', '"chess"', "episodes.environment: there is no environment 'chess'"),
        ('"frozen_lake"', '"frozen_lake"\noptions = {{ depth = 3 }}', "has no option depth"),
        ('name = "try"', 'name = "a b"', "name: "),
        ("[episodes]", "[train]\nsamples = 1\n[episodes]", "train.samples: "),
        ("[episodes]", "[train]\nspeed = 1\n[episodes]", "train.speed: "),
        ("[episodes]", "[train]\ncores = [99]\n[episodes]", "train.cores: "),
        ('out = "{folder}/out"', 'out = "/proc/nowhere"', "out: /proc/nowhere"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        run.load(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert says in str(refused.value)
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.exit_code == 2
    assert says in result.output


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "none.toml" in result.output
