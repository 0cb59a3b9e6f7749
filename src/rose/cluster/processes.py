"""The processes of a settled cluster file, each with its command line. Pure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rose.cluster.cluster_config import HOST, ClusterConfig, JobSection, NodeSection
from rose.cluster.config import Strict
from rose.cluster.launcher import Process

ROSE = (sys.executable, "-m", "rose.cli")


def processes(config: ClusterConfig, secret: str = "") -> list[Process]:
    """In the order in which they need each other; `secret`: the scheduler's."""
    found = []
    if config.weights is not None:
        words = ["weights", "serve", str(config.store_folder)]
        found.append(_listening("store", words, "tcp", config.weights.port))
        if config.relay is not None:
            upstream = f"tcp://{HOST}:{config.weights.port}"
            words = ["relay", upstream, "--folder", str(config.folder / "relay")]
            followers = [job.name for job in config.jobs if job.weights == config.weights_url]
            words += [word for name in followers for word in ("--job", name)]
            words += _options(config.relay, "most_gb")
            found.append(_listening("relay", words, "tcp", config.relay.port))
    if config.scheduler.url is None:
        words = ["scheduler", "--ledger", str(config.folder / "ledger.sqlite")]
        words += [word for job in config.jobs for word in ("--job", _job_word(job))]
        words += _options(config.scheduler, "max_borrowed", "placement", "order")
        found.append(_listening("scheduler", words, "http", config.scheduler.port, secret))
    for node in config.node:
        command = (*ROSE, "node", str(node_file(config, node)))
        found.append(Process(node.name, command, node.url, node.secret or "", node))
    return found


def _listening(name: str, words: list[str], scheme: str, port: int, secret: str = "") -> Process:
    where = f"{HOST}:{port}"
    return Process(name, (*ROSE, *words, "--listen", where), f"{scheme}://{where}", secret)


def _options(section: Strict, *fields: str) -> list[str]:
    given = {field: getattr(section, field) for field in fields}
    pairs = [(f"--{name.replace('_', '-')}", str(v)) for name, v in given.items() if v is not None]
    return [word for pair in pairs for word in pair]


def _job_word(job: JobSection) -> str:
    options = job.model_dump(exclude_none=True, exclude={"name"})
    return ",".join([job.name, *(f"{name}={value}" for name, value in options.items())])


def node_file(config: ClusterConfig, node: NodeSection) -> Path:
    return config.folder / "nodes" / f"{node.name}.toml"


def node_toml(node: NodeSection) -> str:
    """What `rose node` reads."""
    said = node.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"devices"})
    tables = {name: said.pop(name) for name in ("serving", "rollout") if name in said}
    lines = ["# Written by `rose up` when it starts: change the cluster's file instead."]
    lines += _toml(said)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_toml(table)]
    return "\n".join(lines) + "\n"


def _toml(values: dict[str, Any]) -> list[str]:
    """Strings, numbers, booleans and lists look as in JSON."""
    return [f"{name} = {json.dumps(v, ensure_ascii=False)}" for name, v in values.items()]
