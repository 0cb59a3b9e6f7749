import json
from pathlib import Path

import pytest

from rose.models import default_cache, resolve
from rose.models.folder import build


def hidden_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["hidden_size"])


def test_names_are_made_in_the_cache_once(tmp_path: Path) -> None:
    tiny = resolve("tiny-a", tmp_path)
    assert tiny == tmp_path / "tiny-a"
    written = (tiny / "model.safetensors").stat().st_mtime_ns
    assert resolve("tiny-a", tmp_path) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-a"]


def test_the_two_tiny_models_differ(tmp_path: Path) -> None:
    assert hidden_size(resolve("tiny-a", tmp_path)) != hidden_size(resolve("tiny-b", tmp_path))


def test_cache_follows_rose_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "models"
    monkeypatch.delenv("ROSE_HOME")
    assert default_cache() == Path.home() / ".cache" / "rose" / "models"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = resolve("tiny-a", tmp_path)
    assert resolve(str(folder)) == folder


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is not a model"):
        resolve(str(tmp_path))
    with pytest.raises(ValueError, match="no-such-model is not a model"):
        resolve("no-such-model")


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), build(tmp_path / "model") as folder:
        (folder / "config.json").write_text(str(1 / 0))
    assert list(tmp_path.iterdir()) == []


def test_of_two_builds_at_once_the_first_wins(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with build(target) as slow:
        (slow / "config.json").write_text("slow")
        with build(target) as quick:
            (quick / "config.json").write_text("quick")
    assert (target / "config.json").read_text() == "quick"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_in_the_way_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with (
        pytest.raises(FileExistsError, match=str(tmp_path)),
        build(tmp_path) as folder,
    ):
        (folder / "config.json").write_text("{}")
    assert (tmp_path / "notes.txt").read_text() == "mine"
