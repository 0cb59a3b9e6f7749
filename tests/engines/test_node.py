"""The node as people and monitoring see it, over its real HTTP API and the command line."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from rose.cluster.engine import HOST_NICE

METRICS = {
    "rose_activate_seconds",
    "rose_engine_restarts_total",
    "rose_grants_total",
    "rose_kv_cuts_total",
    "rose_kv_grown_total",
    "rose_late_requests_expected_total",
    "rose_kv_quota_bytes",
    "rose_kv_total_bytes",
    "rose_kv_used_bytes",
    "rose_latency_coverage",
    "rose_latency_error",
    "rose_lease_state",
    "rose_node_ready",
    "rose_overhead_seconds",
    "rose_reclaim_last_seconds",
    "rose_refusals_total",
    "rose_revoke_seconds",
    "rose_rollout_alive",
    "rose_rollout_preempted",
    "rose_rollout_running",
    "rose_rollout_waiting",
    "rose_serving_alive",
    "rose_serving_running",
    "rose_serving_waiting",
    "rose_slack_seconds",
    "rose_tokens_lent_total",
    "rose_turns_ended_total",
}
"""What docs/sre.md promises."""


def test_all_documented_metrics_are_there(
    active_node: Any, complete: Any, random_prompts: Any
) -> None:
    def scrape() -> dict[str, str]:
        with urllib.request.urlopen(f"{active_node.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    before = scrape()
    assert {name.partition("{")[0] for name in before} >= METRICS
    assert before['rose_lease_state{state="active"}'] == "1.0"
    complete(active_node.rollout_url, "tiny-b", random_prompts(0, 1, 50), 8)
    after = scrape()
    lent = float(after["rose_tokens_lent_total"]) - float(before["rose_tokens_lent_total"])
    assert lent >= 50 - 32 + 7  # all but a cached block, and every token after the first


def test_rollouts_api_server_yields_the_host_cores_and_nobody_else_does(node: Any) -> None:
    status, mine = node.status(), psutil.Process().nice()
    servers = {role: psutil.Process(status[role]["pid"]).nice() for role in ("serving", "rollout")}
    assert servers == {"serving": mine, "rollout": max(mine, HOST_NICE)}
    node.until(  # a core that was lifted to end a test before falls back within a second
        lambda: {psutil.Process(node.core(role)).nice() for role in servers} == {mine},
        "both cores have the priority of everybody else",
    )


def test_the_page_can_be_dumped(node: Any) -> None:
    command = [sys.executable, "-m", "rose.cli", "page", "dump", str(node.page_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    shown = json.loads(done.stdout, parse_constant=lambda name: 1 / 0)
    assert shown["serving"]["pid"] == node.core("serving")
    assert shown["rollout"]["alive"] is True


def test_a_second_node_for_the_same_device_is_refused(node: Any) -> None:
    second = node.folder / "second.toml"
    port = node.url.rpartition(":")[2]
    second.write_text(node.config.read_text().replace(f"port = {port}", "port = 0"))
    command = [sys.executable, "-m", "rose.cli", "node", str(second)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"already has a node, pid {node.process.pid}" in done.stderr
    assert node.status()["ready"]


def test_a_node_interrupted_while_it_starts_leaves_nothing(
    rose_home: Path, tmp_path: Path, node: Any
) -> None:
    """Both engines are being started when Ctrl-C comes."""
    page = node.page_path.with_name(f"{node.page_path.name}-early")
    port = node.url.rpartition(":")[2]
    config = tmp_path / "node.toml"
    text = node.config.read_text().replace(f"port = {port}", "port = 0")
    config.write_text(
        text.replace(str(node.page_path), str(page)).replace(str(node.folder), str(tmp_path))
    )
    starting = subprocess.Popen([sys.executable, "-m", "rose.cli", "node", str(config)])
    memo = page.with_suffix(".json")
    node.until(lambda: memo.exists() and memo.stat().st_size, "the engines are started")
    engines = [known["pid"] for known in json.loads(memo.read_text())["engines"].values()]
    assert len(engines) == 2
    starting.send_signal(signal.SIGINT)
    assert starting.wait(60) == 0
    assert not [pid for pid in engines if Path(f"/proc/{pid}").exists()]
    assert not list(page.parent.glob(f"{page.name}*"))


def test_the_slo_can_be_changed_while_serving(node: Any) -> None:
    def change(body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"{node.url}/slo", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    before = node.serving().ttft_s
    assert change({"ttft_ms": 900, "tpot_ms": 200})[0] == 200
    node.until(lambda: node.serving().ttft_s > before, "serving works with the new promise")
    for bad in ({"ttft_ms": 900}, {"ttft_ms": 900, "tpot_ms": 0.001}, {"ttft_ms": "x"}):
        status, answer = change(bad)
        assert status == 400
        assert answer["error"]
    assert change({"ttft_ms": 500, "tpot_ms": 100})[0] == 200
    node.until(lambda: node.serving().ttft_s == before, "serving is back to its first promise")
