"""`rose ps`, `rose top` and the scheduler's log, of a real scheduler with emulated engines."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from tests.scheduler.conftest import Cluster, until
from tests.scheduler.test_frontdoor import PROMPT, in_background
from typer.testing import CliRunner

from rose.cli import app
from rose.net import free_ports
from rose.scheduler import view


def test_a_table_has_all_engines_and_jobs(cluster: Cluster) -> None:
    cluster.generate(PROMPT, 4)
    result = CliRunner().invoke(app, ["ps", cluster.url], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert all(engine.url in result.output for engine in cluster.engines)
    assert "default" in result.output


def test_the_live_view_follows_and_survives_a_pause(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = iter("ab"), view.ask

    def ask(url: str, secret: str) -> Any:
        if next(asked, None) == "b":
            raise OSError("away for a moment")
        return real(url, secret)

    looks = iter(range(2))

    def sleep(_: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(view, "ask", ask)
    monkeypatch.setattr(view.time, "sleep", sleep)
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        view.watch(cluster.url, "", Console(file=shown, force_terminal=True, width=200))
    assert "away for a moment" in shown.getvalue()
    assert "turns/s" in shown.getvalue()


@pytest.mark.parametrize("command", ["ps", "top"])
def test_nobody_there_is_one_sentence(command: str) -> None:
    (port,) = free_ports(1)
    result = CliRunner().invoke(app, [command, f"http://127.0.0.1:{port}"])
    assert result.exit_code == 2
    assert "is no scheduler that answers" in result.output


def test_a_turn_that_was_cut_has_a_line_with_its_ids(cluster: Cluster) -> None:
    going = in_background(
        lambda: cluster.generate(
            PROMPT, 60, headers={"X-Request-ID": "mine", "X-Session-ID": "walk"}
        )
    )
    until(lambda: cluster.running() == 1)
    (where,) = [n for n in (0, 1) if cluster.emulate(n)["running"]]
    cluster.emulate(where, revoked=True)
    assert going.result()[0] == 200
    lines = [json.loads(line) for line in cluster.scheduler.log().splitlines() if "{" in line]
    (said,) = [line for line in lines if line["message"] == "done"]
    assert said["turn"].startswith("default/mine/")
    assert said["trajectory"].startswith("walk/")
    assert (said["cuts"], said["tokens"], said["job"]) == (["revoked"], 60, "default")
