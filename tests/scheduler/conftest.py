"""Emulated engines and the scheduler, each a process of its own, over real HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.net import free_ports

PATIENCE_S = 120.0


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    asked = urllib.request.Request(
        url, data, {"Content-Type": "application/json"} | (headers or {})
    )
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Process:
    """Dead at the end, whatever happened."""

    def __init__(self, port: int, log: Path, *words: object) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._words = [sys.executable, *map(str, words)]
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as sink:
            self.process = subprocess.Popen(self._words, stdout=sink, stderr=sink)

    def await_health(self) -> None:
        def healthy() -> bool:
            assert self.process.poll() is None, self._log.read_text()
            try:
                return call(f"{self.url}/health")[0] == 200
            except OSError:
                return False

        until(healthy)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text()


class Cluster:
    def __init__(self, folder: Path, engines: int, *options: object, alone: bool = False) -> None:
        """`alone`: the scheduler is not told of the engines."""
        self._folder = folder
        ports = free_ports(engines + 1)
        self.engines = [
            Process(port, folder / f"engine-{port}.log", "-m", "rose.bench.emulated", port)
            for port in ports[1:]
        ]
        told = [] if alone else self.engines
        words = [word for engine in told for word in ("--engine", engine.url)]
        words += ["--ledger", str(folder / "ledger.sqlite"), "--listen", f"127.0.0.1:{ports[0]}"]
        self.scheduler = Process(
            ports[0], folder / "scheduler.log", "-m", "rose.cli", "scheduler", *words, *options
        )
        for one in (*self.engines, self.scheduler):
            one.await_health()

    @property
    def url(self) -> str:
        return self.scheduler.url

    def emulate(self, number: int, **what: bool) -> Any:
        return call(f"{self.engines[number].url}/emulate", what)[1]

    def running(self) -> int:
        return sum(self.emulate(number)["running"] for number in range(len(self.engines)))

    def generate(self, tokens: list[int], most: int, **more: Any) -> tuple[int, Any]:
        headers = more.pop("headers", None)
        sampling = {"max_tokens": most, "ignore_eos": True, "logprobs": 1} | more.pop(
            "sampling", {}
        )
        body = {"token_ids": tokens, "sampling_params": sampling} | more
        return call(f"{self.url}/inference/v1/generate", body, headers)

    def close(self) -> None:
        for one in (self.scheduler, *self.engines):
            one.end()


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(engines: int = 2, *options: object, alone: bool = False) -> Cluster:
        made.append(Cluster(tmp_path, engines, *options, alone=alone))
        return made[-1]

    yield make
    for one in made:
        for engine in one.engines:
            if engine.process.poll() is None:
                engine.signal(signal.SIGCONT)
        one.close()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster()
