"""`rose up` without engines: what it refuses, what it would run, and how it keeps processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from rose.claims import claim
from rose.cli import app
from rose.cluster import cluster_config, launcher, restarts, up
from rose.cluster.cluster_config import LOCK, ClusterConfig, check, parse, settle
from rose.cluster.config import ConfigError, NodeConfig, load
from rose.cluster.launcher import Child, Local, Process
from rose.cluster.memo import Memo
from rose.cluster.processes import ROSE, node_toml, processes
from rose.net import free_ports
from rose.scheduler import jobspec

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 60.0
ROLLOUT = {"rollout": {"model": "tiny-b"}}
SERVING = {"serving": {"model": "tiny-a", "ttft_ms": 500, "tpot_ms": 150}}
GOOD: dict[str, Any] = {
    "scheduler": {"port": 8400},
    "weights": {"port": 7400},
    "relay": {"port": 7401},
    "node": [
        {"device": "cuda:0", "port": 8300, **ROLLOUT},
        {"device": "cuda:1", **SERVING, **ROLLOUT},
    ],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with another value at `node.0.device`, say; None takes it out."""
    content = json.loads(json.dumps(GOOD))
    *way, last = path.split(".")
    holder: Any = content
    for step in way:
        holder = holder[int(step)] if step.isdigit() else holder.setdefault(step, {})
    if value is None:
        del holder[last]
    elif last.isdigit():
        holder.append(value)
    else:
        holder[last] = value
    return content


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("colour", "red", "colour: Extra"),
        ("scheduler.colour", "red", "scheduler.colour: Extra"),
        ("node.0.colour", "red", "node.0.colour: Extra"),
        ("scheduler.port", 70000, "scheduler.port: "),
        ("scheduler.placement", "luck", "scheduler.placement: is 'luck', must be one of cost"),
        ("scheduler.order", "luck", "scheduler.order: is 'luck', must be one of longest_first"),
        ("scheduler.max_borrowed", -1, "scheduler.max_borrowed: "),
        ("scheduler.url", "http://there:1", "scheduler.url: .* leave the other fields out"),
        ("scheduler", {"url": "http://there:1"}, "scheduler.url: .* leave out .*weights"),
        ("scheduler", {"url": "there"}, "scheduler.url: "),
        ("weights", None, "relay: .* add \\[weights\\]"),
        ("weights.job", "../x", "weights.job: .*letters"),
        ("relay.most_gb", 0, "relay.most_gb: "),
        ("relay.port", 7400, "relay.port: 7400 is weights.port already"),
        ("node.1.port", 8400, "node.1.port: 8400 is scheduler.port already"),
        ("node.1.serving.port", 8300, "node.1.serving.port: 8300 is node.0.port already"),
        ("node", None, "node: "),
        ("node", [], "node: "),
        ("node.0.rollout", None, "node.0.rollout: Field required"),
        ("node.0.device", "tpu:0", "node.0.device: .*tpu:0.* unknown"),
        ("node.0.device", "cpu:999", "node.0.device: .*cpu:999.* may use cores"),
        ("node.1.device", "cuda:0", "node.1.device: cuda:0 is node.0.device already"),
        ("node.1.rollout.model", "tiny-a", "node.1.rollout.model: 'tiny-a' beside 'tiny-b'"),
        ("node.0.rollout.model", "/no/such", "node.0.rollout.model: /no/such is not a model"),
        ("node.1.devices", [], "node.1.devices: "),
        ("node.1.devices", ["cuda:2", "tpu:0"], "node.1.devices: .*tpu:0"),
        ("node.1.devices", ["cuda:2"], "node.1.device: cannot be given beside `devices`"),
        ("node.2", {"devices": ["cuda:3"], "port": 1, **ROLLOUT}, "node.2.port: cannot be given"),
        ("node.2", {"devices": ["cuda:3", "cuda:1"], **ROLLOUT}, "node.2.devices: cuda:1 is node"),
        ("job", [{"name": "a", "share": 0}], "job.0: share is 0.0, less than"),
        ("job", [{"name": "a/b"}], "job.0: "),
        ("job", [{"name": "a", "weights": "tcp://x:1,y"}], "job.0: weights has a comma"),
        ("job", [{"name": "a"}, {"name": "a"}], "job.1.name: 'a' is used twice"),
        ("job", [{"name": "a", "weights": "tcp://x:1"}], "weights: every .* of its own"),
        ("folder", "a,b", "folder: 'a,b' has a ','"),
    ],
)
def test_files_that_cannot_be(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(changed(path, value), "FILE")
    assert re.match(f"FILE: {said}", str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


def test_overlapping_cores_and_pages() -> None:
    content = {"node": [{"device": "cpu:0", **ROLLOUT}] * 2}
    with pytest.raises(ConfigError, match=r"node\.1\.device: of cpu:0, cores \[0\] are node\.0"):
        parse(content, "FILE")
    content = {"node": [{"device": f"cuda:{n}", "page": "/dev/shm/p", **ROLLOUT} for n in (0, 1)]}
    with pytest.raises(ConfigError, match=r"node\.1\.page: /dev/shm/p is that of node\.0"):
        parse(content, "FILE")


def test_jobs_are_said_in_one_place() -> None:
    content = changed("job", [{"name": "a"}])
    content["weights"]["job"] = "b"
    with pytest.raises(ConfigError, match=r"weights\.job: the jobs are those of \[\[job\]\]"):
        parse(content, "FILE")


@pytest.fixture
def small(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setenv("ROSE_HOME", str(tmp_path_factory.mktemp("home")))
    node = {"device": "cpu:0", "kv_gb": 0.05, "page": str(tmp_path / "page"), **ROLLOUT}
    return {"folder": str(tmp_path / "cluster"), "weights": {}, "node": [node]}


def refused(content: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as found:
        check(parse(content, "FILE"))
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_this_machine_has_no_room_for(small: dict[str, Any], tmp_path: Path) -> None:
    check(parse(small, "FILE"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(small | {"scheduler": {"port": port}})
        assert said == f"scheduler.port {port} is in use on 127.0.0.1"
        node = small["node"][0] | {"rollout": {"model": "tiny-b", "port": port}}
        assert refused(small | {"node": [node]}).startswith(f"node.0.rollout.port {port} is in use")
    node = small["node"][0] | {"kv_gb": 10_000}
    assert re.match(r"node: kv_gb .* node-cpu0 10000\.\d GiB", refused(small | {"node": [node]}))
    (tmp_path / "file").touch()
    said = refused(small | {"folder": str(tmp_path / "file" / "below")})
    assert said.startswith("folder: ") and f"{tmp_path / 'file'} is not a folder" in said
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"], "a refusal left something"


def test_a_folder_belongs_to_one_cluster(small: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with claim(tmp_path / "cluster" / LOCK):
        assert re.match("folder: .*/cluster is that of a cluster that runs", refused(small))
    check(parse(small, "FILE"))


def test_nodes_must_fit_together(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them alone would."""
    config = parse(small, "FILE")
    needed = cluster_config._memory(config.node[0], "node.0")
    room = type("Room", (), {"available": int(1.5 * needed)})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    check(config)
    two = config.model_copy(update={"node": config.node * 2})
    monkeypatch.setattr(cluster_config, "_agreeing", lambda config: config)
    monkeypatch.setattr(cluster_config.NodeSection, "name", property(lambda node: id(node)))
    with pytest.raises(ConfigError, match="node: kv_gb and the models do not fit beside each"):
        check(two)


def test_the_command_says_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('folder = "x"\n[relay]\n[[node]]\n[node.rollout]\nmodel = "tiny-b"\n')
    result = CliRunner().invoke(app, ["up", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"rose: {file}: relay: there is nothing to pass on, add [weights]\n"
    missing = CliRunner().invoke(app, ["up", str(tmp_path / "none.toml")])
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
    assert "none.toml: No such file" in missing.stderr


# ---- what runs


def ports(count: int) -> list[int]:
    return list(range(9000, 9000 + count))


def commands(config: ClusterConfig) -> dict[str, list[str]]:
    found = {one.name: one.command for one in processes(config)}
    assert all(command[: len(ROSE)] == ROSE for command in found.values())
    return {name: list(command[len(ROSE) :]) for name, command in found.items()}


def test_command_lines(tmp_path: Path) -> None:
    content = GOOD | {"folder": str(tmp_path), "scheduler": {"port": 8400, "max_borrowed": 3}}
    config = settle(parse(content, "FILE"), free=ports)
    found = commands(config)
    assert list(found) == ["store", "relay", "scheduler", "node-cuda0", "node-cuda1"]
    assert found["store"] == ["weights", "serve", f"{tmp_path}/store", "--listen", "127.0.0.1:7400"]
    assert found["relay"] == [
        *("relay", "tcp://127.0.0.1:7400", "--folder", f"{tmp_path}/relay"),
        *("--job", "default", "--listen", "127.0.0.1:7401"),
    ]
    job = f"default,weights=tcp://127.0.0.1:7401,folder={tmp_path}/copies/default"
    assert found["scheduler"] == [
        *("scheduler", "--ledger", f"{tmp_path}/ledger.sqlite", "--job", job),
        *("--max-borrowed", "3", "--listen", "127.0.0.1:8400"),
    ]
    assert found["node-cuda1"] == ["node", f"{tmp_path}/nodes/node-cuda1.toml"]
    assert (config.store_url, config.weights_url) == (
        f"file://{tmp_path}/store",
        "tcp://127.0.0.1:7401",
    )


def test_without_a_relay_or_weights(tmp_path: Path) -> None:
    content = {"folder": str(tmp_path), "node": [{"device": "cuda:0", **ROLLOUT}]}
    plain = settle(parse(content, "FILE"), free=ports)
    assert list(commands(plain)) == ["scheduler", "node-cuda0"]
    assert plain.weights_url == plain.store_url == f"file://{tmp_path}/store"
    assert "default" in commands(plain)["scheduler"]
    served = settle(parse(content | {"weights": {"job": "j"}}, "FILE"), free=ports)
    assert list(commands(served)) == ["store", "scheduler", "node-cuda0"]
    assert f"j,weights={served.weights_url}" in " ".join(commands(served)["scheduler"])
    there = content | {"scheduler": {"url": "http://there:8400"}}
    elsewhere = settle(parse(there, "FILE"), free=ports)
    assert list(commands(elsewhere)) == ["node-cuda0"]
    assert elsewhere.node[0].scheduler == "http://there:8400"


def test_jobs_follow_the_clusters_store_unless_they_have_another(tmp_path: Path) -> None:
    jobs = [
        {"name": "a", "share": 2, "max_staleness": 1},
        {"name": "b", "per_version": 256, "weights": "tcp://there:1"},
    ]
    config = settle(parse(GOOD | {"folder": str(tmp_path), "job": jobs}, "FILE"), free=ports)
    found = commands(config)
    words = found["scheduler"]
    a, b = [jobspec.parse(words[n + 1]) for n, word in enumerate(words) if word == "--job"]
    assert (a.name, a.share, a.max_staleness, a.weights) == ("a", 2.0, 1, config.weights_url)
    assert (b.name, b.per_version, b.weights) == ("b", 256, "tcp://there:1")
    assert [w for n, w in enumerate(found["relay"]) if found["relay"][n - 1] == "--job"] == ["a"]


def test_what_is_left_open_is_settled(tmp_path: Path) -> None:
    content = {
        "folder": str(tmp_path),
        "scheduler": {"port": 9001},
        "node": [
            {"devices": ["cuda:0", "cuda:1"], "headroom": 0.3, **SERVING, **ROLLOUT},
            {"device": "cuda:2", "log_dir": "mine", "scheduler": "http://other:1", **ROLLOUT},
        ],
    }
    config = settle(parse(content, "FILE"), secret="s", free=ports)
    assert [node.device for node in config.node] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [node.headroom for node in config.node] == [0.3, 0.3, 0.2]
    first, _, last = config.node
    assert first.log_dir == tmp_path / "logs" / "node-cuda0"
    assert (first.scheduler, first.scheduler_secret) == ("http://127.0.0.1:9001", "s")
    assert (last.log_dir, last.scheduler, last.scheduler_secret) == (
        Path("mine"),
        "http://other:1",
        None,
    )
    found = [config.scheduler.port, *(node.port for node in config.node)]
    found += [engine.port for node in config.node for engine in node.engines.values()]
    assert 0 not in found and len(set(found)) == len(found) == 9
    assert first.serving_url and last.serving_url is None


def test_a_nodes_file_says_what_the_cluster_says(tmp_path: Path) -> None:
    node = {
        "device": "cuda:0",
        "page": str(tmp_path / "pägé"),
        "restart_rollout": False,
        "lease_s": 1e-5,
        "serving": SERVING["serving"] | {"args": ["--host", 'a "b" \\ c']},
        **ROLLOUT,
    }
    (settled,) = settle(parse({"folder": str(tmp_path), "node": [node]}, "FILE")).node
    file = tmp_path / "node.toml"
    file.write_text(node_toml(settled))
    read = load(file)
    assert type(read) is NodeConfig
    assert read.model_dump() == settled.model_dump(exclude={"devices"})


@pytest.mark.parametrize("name", ["cluster-cpu", "cluster-paper-8b"])
def test_examples(name: str, tmp_path: Path) -> None:
    content = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    for node in content["node"]:
        for role in ("serving", "rollout"):
            if node.get(role, {}).get("model", "").startswith("/"):
                node[role]["model"] = "tiny-a"  # its folder is a placeholder
    if len(os.sched_getaffinity(0)) < 2 and name == "cluster-cpu":
        pytest.skip("has two devices, and this machine one core")
    config = settle(parse(content, name), free=ports)
    devices = {"cluster-cpu": 2, "cluster-paper-8b": 24}[name]
    assert len(commands(config)) == 3 + devices
    assert sum(node.serving is not None for node in config.node) == {2: 1, 24: 16}[devices]


# ---- how it is kept running


LISTEN = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
time.sleep(600)
"""
FAIL = """
import sys, time
time.sleep(float(sys.argv[1]))
print("noise\\nrose: field x is wrong\\nmore noise", file=sys.stderr)
sys.exit(2)
"""


def python(name: str, code: str, *words: object, port: int = 1) -> Process:
    command = (sys.executable, "-c", code, *map(str, words))
    return Process(name, command, f"tcp://127.0.0.1:{port}")


def listening(name: str) -> Process:
    (port,) = free_ports(1)
    return python(name, LISTEN, port, port=port)


class Recorded(Local):
    """Knows what it has started."""

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self.children: list[Child] = []

    def start(self, process: Process) -> Child:
        self.children.append(super().start(process))
        return self.children[-1]

    def are_gone(self) -> bool:
        return bool(self.children) and not any(psutil.pid_exists(c.pid) for c in self.children)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if true():
                return
            await asyncio.sleep(0.02)


def test_what_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.1)
    said: list[str] = []
    local = Recorded(tmp_path / "logs")

    async def go() -> None:
        stages = [[listening("a")], [listening("b"), listening("c")]]
        async with up.supervising(stages, local, said.append) as supervisor:
            assert [line.split()[:3] for line in said[:1]] == [["a", "is", "up"]]
            assert len(said) == len(local.children) == 3
            first = supervisor.pid("a")
            os.kill(first, signal.SIGKILL)
            await until(lambda: len(said) == 5)
            assert supervisor.pid("a") != first
            assert re.match(r"a got signal 9, starting it again in 0\.1 s: listening", said[3])
            assert said[4].startswith("a is up at tcp://")

    asyncio.run(go())
    assert local.are_gone()
    assert (tmp_path / "logs" / "a.log").read_text() == "listening\nlistening\n"
    assert sorted(one.name for one in (tmp_path / "logs").iterdir()) == ["a.log", "b.log", "c.log"]


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_a_users_error_ends_everything(tmp_path: Path, after_s: float) -> None:
    """Also one that shows when all are up."""
    local = Recorded(tmp_path)
    began: list[bool] = []
    (port,) = free_ports(1)
    wrong = python("wrong", FAIL, after_s, port=port)

    async def go() -> None:
        listener = socket.create_server(("127.0.0.1", port)) if after_s else None
        stages = [[listening("a")], [wrong]]
        try:
            async with up.supervising(stages, local, lambda line: None):
                began.append(True)
                await asyncio.Event().wait()
        finally:
            if listener is not None:
                listener.close()

    with pytest.raises(ConfigError, match=r"^wrong: field x is wrong \(see .*wrong\.log\)$"):
        asyncio.run(go())
    assert bool(began) == bool(after_s)
    assert local.are_gone()


def test_an_error_of_the_block_is_its_own(tmp_path: Path) -> None:
    local = Recorded(tmp_path)

    async def go() -> None:
        async with up.supervising([[listening("a")]], local, print):
            raise FileNotFoundError("of the block")

    with pytest.raises(FileNotFoundError, match="of the block"):
        asyncio.run(go())
    assert local.are_gone()


INTERRUPTED = """
import asyncio, sys
from pathlib import Path
from tests.cluster.test_up import listening, python
from rose.cluster import up
from rose.cluster.launcher import Local

async def go():
    silent = python("b", "import time; time.sleep(600)")
    second = listening("b") if sys.argv[2] == "running" else silent
    async with up.supervising([[listening("a")], [second]], Local(Path(sys.argv[1])), print):
        await asyncio.Event().wait()

asyncio.run(go())
"""


@pytest.mark.parametrize("moment", ["starting", "running"])
def test_an_interruption_ends_everything(tmp_path: Path, moment: str) -> None:
    root = Path(__file__).parents[2]
    words = [sys.executable, "-u", "-c", INTERRUPTED, str(tmp_path), moment]
    process = subprocess.Popen(
        words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range({"starting": 1, "running": 2}[moment]):
        assert " is up at " in process.stdout.readline()
    deadline = time.monotonic() + PATIENCE_S
    while len(children := psutil.Process(process.pid).children()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert not any(child.is_running() for child in children)


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(below.pid, beside.pid, flush=True)
time.sleep(600)
"""


async def said_by(child: Child, folder: Path) -> list[int]:
    log = folder / "a.log"
    await until(lambda: log.read_text().endswith("\n"))
    assert child.alive
    return [int(word) for word in log.read_text().split()]


def test_a_family_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "STOP_S", 0.5)
    monkeypatch.setattr(launcher, "LEAVE_S", 0.1)

    async def go() -> list[int]:
        child = Local(tmp_path).start(python("a", STUBBORN))
        family = await said_by(child, tmp_path)
        await child.stop()
        await child.stop()  # as often as one likes
        assert child.exit_code == -signal.SIGKILL
        await until(lambda: not any(map(_lives, family)))
        return [child.pid, *family]

    assert len(asyncio.run(go())) == 3


def test_what_a_dead_process_left_in_its_group_is_killed(tmp_path: Path) -> None:
    async def go() -> None:
        child = Local(tmp_path).start(python("a", STUBBORN))
        below, beside = await said_by(child, tmp_path)
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: not child.alive)
        await until(lambda: not _lives(beside))
        assert _lives(below)  # in a group of its own, as engines are
        os.kill(below, signal.SIGKILL)

    asyncio.run(go())


NODE = """
import subprocess, sys, time
from pathlib import Path
from rose.cluster.engine import Engine
from rose.cluster.memo import Memo
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
engines = [Engine("rollout", "http://127.0.0.1:1", engine.pid, None)]
path = Path(sys.argv[1])
Memo(path, path.with_suffix(".taken-back")).remember(engines, offered=True)
print(engine.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("started_by", ["us", "others"])
def test_engines_of_a_killed_node_end_with_it(tmp_path: Path, started_by: str) -> None:
    content = {"page": str(tmp_path / "page"), **ROLLOUT}
    node = NodeConfig.model_validate(content)
    memo = Memo.of(node)
    process = Process("a", (sys.executable, "-c", NODE, str(memo.path)), "tcp://x:1", node=node)

    async def go() -> None:
        child = Local(tmp_path).start(process)
        (engine,) = await said_by(child, tmp_path)
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: not child.alive)
        assert _lives(engine)
        if started_by == "us":
            await child.stop()
            await until(lambda: not _lives(engine))
            assert not memo.path.exists()
        else:
            other = Local(tmp_path).start(process)
            os.kill(other.pid, signal.SIGKILL)
            await other.stop()
            assert _lives(engine)
            os.kill(engine, signal.SIGKILL)

    asyncio.run(go())


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
