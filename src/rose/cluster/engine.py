"""One vLLM server as a child process: its command, its start, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from rose import models
from rose.cluster.config import ConfigError, EngineConfig, NodeConfig, ServingConfig
from rose.executor.processes import Writer, is_alive, process_start
from rose.net import tcp_socket

READY_S = 180.0
"""An engine that is not healthy after three minutes will not be."""
STOP_S = 10.0
KILL_S = 1.5
"""What a kill takes, with gigabytes to free. A process that lives on is in the kernel's hands."""
HOST_NICE = 10
"""Of the rollout engine's API server: on the host cores, too, serving comes first."""
ROLLOUT_OOM_SCORE = 900
"""The kernel's out-of-memory killer takes the rollout engine first."""


def command(config: NodeConfig, role: str, port: int, options: Mapping[str, Any]) -> list[str]:
    """The plain vLLM command of an engine; everything rose adds is an ordinary option."""
    engine: EngineConfig | None = config.serving if role == "serving" else config.rollout
    assert engine is not None
    on_cpu = config.where.gpu is None
    share = 1.0 if role == "serving" or config.serving is None else 1.0 - config.headroom
    scheduler = {
        ("serving", True): "rose.executor.vllm.serving.ServingScheduler",
        ("serving", False): "rose.executor.vllm.serving.AsyncServingScheduler",
    }.get((role, on_cpu), "rose.executor.vllm.rollout.RolloutScheduler")
    dtype = "float32" if engine.dtype == "auto" and on_cpu else engine.dtype
    words = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(models.resolve(engine.model)), "--served-model-name", engine.model),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_seqs), "--block-size", str(engine.block_size)),
        *("--kv-cache-memory-bytes", str(int(share * config.kv_total))),
        *("--scheduler-cls", scheduler),
        *("--additional-config", json.dumps({"rose": dict(options)})),
    ]
    if on_cpu:
        words += [
            *("--worker-cls", "rose.executor.vllm.worker.ElasticWorker"),
            "--distributed-executor-backend",
            "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            "--enforce-eager",
        ]
    if role == "rollout":
        words += [
            *("--no-async-scheduling", "--max-num-batched-tokens", "512", "--enable-scale-out"),
            *("--weight-transfer-config", json.dumps({"backend": "rose"})),
            *("--worker-extension-cls", "rose.transfer.vllm.worker.Weights"),
            # Of what was sampled from: at other temperatures than 1, trainers need these.
            *("--logprobs-mode", "processed_logprobs"),
        ]
    return [*words, *engine.args]


def environment(config: NodeConfig, role: str) -> dict[str, str]:
    extra = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if config.where.gpu is not None:
        extra["CUDA_VISIBLE_DEVICES"] = str(config.where.gpu)
    else:
        extra["OMP_NUM_THREADS"] = str(len(config.where.cores))
    if role == "rollout":
        extra["VLLM_SERVER_DEV_MODE"] = "1"  # weight and pause routes; bound to loopback
    return {**os.environ, **extra}


class Engine:
    """A running engine: one we started, or one that was there before us (`adopt`)."""

    def __init__(self, role: str, url: str, pid: int, log: Path | None) -> None:
        self.role = role
        self.url = url
        self.pid = pid
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.started = process_start(pid) if pid else None

    @classmethod
    def start(cls, config: NodeConfig, role: str, port: int, options: Mapping[str, Any]) -> Engine:
        config.log_dir.mkdir(parents=True, exist_ok=True)
        log = config.log_dir / f"{role}.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                command(config, role, port, options),
                env=environment(config, role),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                # Same POSIX session as the other engine (autogroup), own group (no Ctrl-C).
                process_group=0,
                preexec_fn=_before_exec(role),
            )
        engine = cls(role, f"http://127.0.0.1:{port}", process.pid, log)
        engine._process = process
        return engine

    @property
    def alive(self) -> bool:
        if self._process is not None:
            self._process.poll()  # reaps it
        return self.started is not None and is_alive(Writer(self.pid, self.started))

    async def healthy(self, session: aiohttp.ClientSession) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            timeout = aiohttp.ClientTimeout(total=2)
            async with session.get(f"{self.url}/health", timeout=timeout) as answer:
                return answer.status == 200
        return False

    async def ready(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + READY_S
        while not await self.healthy(session):
            if self.pid and not self.alive:
                raise ConfigError(f"the {self.role} engine ended at start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the {self.role} engine at {self.url} is not healthy after {READY_S:.0f} s"
                )
            await asyncio.sleep(0.25)

    def keep_to(self, cores: tuple[int, ...]) -> None:
        """Pin the HTTP server; the engine core below it places its own threads."""
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in psutil.Process(self.pid).threads():
                os.sched_setaffinity(thread.id, cores)

    def yield_host(self) -> None:
        """Let this API server's threads wait for others on the host cores."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in psutil.Process(self.pid).threads():
                with contextlib.suppress(ProcessLookupError):
                    if os.getpriority(os.PRIO_PROCESS, thread.id) < HOST_NICE:
                        os.setpriority(os.PRIO_PROCESS, thread.id, HOST_NICE)

    def last_words(self) -> str:
        """The line of the log that most likely says what went wrong."""
        if self.log is None or not self.log.exists():
            return "no log"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        telling = [
            line
            for line in lines
            if re.search(r"\w+Error: ", line) and "Engine core initialization failed" not in line
        ]
        return f"{(telling or lines or ['no output'])[-1].strip()[-300:]} (see {self.log})"

    def family(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def stop(self, also: int | None = None, gently: bool = True) -> bool:
        """End the engine and every process below it; `also` is its core, should it be orphaned.

        False when one of them does not end: the kernel holds it (state D), and its memory with it.
        """
        try:
            members = self.family()
            if also is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    members.append(psutil.Process(also))
        except OSError:  # no descriptors left to look with: the process group takes none
            return await self._kill_group()
        if gently and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            members = await self._left(members, STOP_S)
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                if not _cleans_up(member):
                    member.kill()
        waited_for = [m for m in members if not _ends_by_itself(m)]
        return not await self._left(waited_for, KILL_S) and self._is_reaped()

    async def _left(self, members: list[psutil.Process], most_s: float) -> list[psutil.Process]:
        """Those that have not ended after so long. Our own child has when it can be reaped: before,
        it may look like a zombie while some of its threads still run."""
        deadline = time.monotonic() + most_s
        while True:
            members = [m for m in members if _runs(m)]
            reaped = self._is_reaped()
            if (reaped and not members) or time.monotonic() > deadline:
                return members
            await asyncio.sleep(0.02)

    def _is_reaped(self) -> bool:
        """True also for an engine that is not our child."""
        return self._process is None or self._process.poll() is not None

    async def _kill_group(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, signal.SIGKILL)
        for _ in range(int(KILL_S / 0.02)):
            if not self.alive:
                break
            await asyncio.sleep(0.02)
        return not self.alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _ends_by_itself(process: psutil.Process) -> bool:
    try:
        return _cleans_up(process)
    except psutil.NoSuchProcess:
        return True


def _cleans_up(process: psutil.Process) -> bool:
    """Python's resource tracker: ends by itself, after removing what the killed ones left."""
    return any("resource_tracker" in word for word in process.cmdline())


def _before_exec(role: str) -> Callable[[], None]:
    def prepare() -> None:
        if role == "rollout":
            Path("/proc/self/oom_score_adj").write_text(str(ROLLOUT_OOM_SCORE))

    return prepare


def bound(wanted: int, field: str, host: str = "127.0.0.1") -> socket.socket:
    """A socket that holds its port, so that nothing started later takes it; not yet listening.

    A taken port is the user's error.
    """
    holder = tcp_socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not matter
    try:
        holder.bind((host, wanted))
    except OSError as error:
        holder.close()
        raise ConfigError(f"{field} {wanted} is in use on {host}") from error
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return holder


def free_port(wanted: int, field: str) -> int:
    """A port that can be bound now."""
    with bound(wanted, field) as probe:
        return int(probe.getsockname()[1])


def attached(serving: ServingConfig) -> Engine:
    """The serving engine of an SRE: watched, never started or stopped by us."""
    assert serving.attach is not None
    return Engine("serving", serving.attach.rstrip("/"), 0, None)
