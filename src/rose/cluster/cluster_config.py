"""The file of a whole cluster on one machine.

    folder    logs, ledger, weights and node files
    scheduler, weights, relay    one process each; all may be left out
    job       as `rose scheduler --job`
    node      as the file of `rose node`; `devices` makes one of each device

`parse` refuses what cannot be whatever the machine, `check` what this machine has no room for, and
`settle` fills in what was left open; `processes` are a pure function of a settled file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from pydantic import Field, field_validator, model_validator

from rose import models
from rose.claims import claim
from rose.cluster.config import (
    ENGINE_OVERHEAD,
    ConfigError,
    EngineConfig,
    NodeConfig,
    Port,
    Strict,
    read,
    validated,
)
from rose.cluster.device import parse_device
from rose.cluster.engine import bound
from rose.net import free_ports
from rose.scheduler import order as orders
from rose.scheduler import placement as placements
from rose.scheduler.jobspec import JobSpec
from rose.transfer.manifest import check_job

HOST = "127.0.0.1"
LOCK = "cluster.lock"
NOT_IN_FOLDER = ",#?"
"""Characters that mean something in `--job`, or in the URL of a store."""
SINGULAR = ("device", "port", "page", "serving.port", "serving.attach", "rollout.port")
"""Fields of a node that no other one can have too."""


class SchedulerSection(Strict):
    port: Port = 0
    """0, here and elsewhere, picks a free one."""
    url: str | None = Field(None, pattern=r"^https?://[^/]+/?$")
    """Of a scheduler that runs already: none is started, and it has its own jobs."""
    max_borrowed: int | None = Field(None, ge=0)
    placement: str | None = None
    order: str | None = None

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, value: str | None) -> str | None:
        return _one_of(value, placements.POLICIES)

    @field_validator("order")
    @classmethod
    def _known_order(cls, value: str | None) -> str | None:
        return _one_of(value, orders.POLICIES)


def _one_of(value: str | None, known: dict[str, Any]) -> str | None:
    if value is not None and value not in known:
        raise ValueError(f"is {value!r}, must be one of {', '.join(known)}")
    return value


class WeightsSection(Strict):
    port: Port = 0
    job: str = "default"
    """Where there are no [[job]]s."""

    @field_validator("job")
    @classmethod
    def _storable(cls, value: str) -> str:
        return check_job(value)


class RelaySection(Strict):
    port: Port = 0
    most_gb: float | None = Field(None, gt=0)


class JobSection(Strict):
    name: str
    share: float | None = None
    most_running: int | None = None
    max_borrowed: int | None = None
    max_staleness: int | None = None
    per_version: int | None = None
    weights: str | None = None
    """Another store than the cluster's."""
    folder: str | None = None

    @model_validator(mode="after")
    def _possible(self) -> JobSection:
        check_job(self.name)
        given = self.model_dump(exclude_none=True)
        JobSpec(**given)
        if found := [name for name in ("weights", "folder") if "," in given.get(name, "")]:
            raise ValueError(f"{found[0]} has a comma in it")
        return self


class NodeSection(NodeConfig):
    port: Port = 0
    devices: tuple[str, ...] | None = Field(None, min_length=1)
    """Instead of `device`: a node of each, otherwise the same."""

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for one in value or ():
            parse_device(one)
        return value

    def each(self) -> tuple[NodeSection, ...]:
        given = self.model_dump(exclude_unset=True, exclude={"devices"})
        devices = self.devices or (self.device,)
        return tuple(NodeSection.model_validate(given | {"device": one}) for one in devices)

    @property
    def name(self) -> str:
        return f"node-{self.device.replace(':', '')}"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def rollout_url(self) -> str:
        return f"http://{HOST}:{self.rollout.port}"

    @property
    def serving_url(self) -> str | None:
        if self.serving is None:
            return None
        return self.serving.attach or f"http://{HOST}:{self.serving.port}"

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """Those that the node starts."""
        found: dict[str, EngineConfig] = {"rollout": self.rollout}
        if self.serving is not None and not self.serving.attach:
            found["serving"] = self.serving
        return found


class ClusterConfig(Strict):
    folder: Path = Path("rose-cluster")
    scheduler: SchedulerSection = SchedulerSection()
    weights: WeightsSection | None = None
    """None: no store is served, and whoever trains leads the engines to new weights."""
    relay: RelaySection | None = None
    """None: engines fetch from the store itself."""
    job: tuple[JobSection, ...] = ()
    node: tuple[NodeSection, ...] = Field(min_length=1)

    @field_validator("folder")
    @classmethod
    def _plain(cls, value: Path) -> Path:
        if found := [one for one in NOT_IN_FOLDER if one in str(value)]:
            raise ValueError(f"{str(value)!r} has a {found[0]!r} in it: choose another name")
        return value

    @property
    def scheduler_url(self) -> str:
        return self.scheduler.url or f"http://{HOST}:{self.scheduler.port}"

    @property
    def store_folder(self) -> Path:
        return self.folder / "store"

    @property
    def store_url(self) -> str:
        """For publishers."""
        return f"file://{self.store_folder}"

    @property
    def weights_url(self) -> str:
        """For engines."""
        served = self.relay or self.weights
        return self.store_url if served is None else f"tcp://{HOST}:{served.port}"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def jobs(self) -> tuple[JobSection, ...]:
        """As the scheduler has them; those without a store of their own follow the cluster's."""
        name = self.weights.job if self.weights else "default"
        return tuple(self._following(job) for job in self.job or (JobSection(name=name),))

    def _following(self, job: JobSection) -> JobSection:
        if self.weights is None or job.weights:
            return job
        copies = job.folder or str(self.folder / "copies" / job.name)
        return job.model_copy(update={"weights": self.weights_url, "folder": copies})


def load(path: Path) -> ClusterConfig:
    return _agreeing(read(path, ClusterConfig), f"{path}: ")


def parse(content: dict[str, Any], source: str) -> ClusterConfig:
    return _agreeing(validated(content, source, ClusterConfig), f"{source}: ")


def _agreeing(config: ClusterConfig, source: str = "") -> ClusterConfig:
    for sentence in _conflicts(config):
        raise ConfigError(f"{source}{sentence}")
    return config


def _conflicts(config: ClusterConfig) -> Iterator[str]:
    """Of fields with each other."""
    names = [job.name for job in config.job]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield f"job.{number}.name: {name!r} is used twice"
    if config.relay is not None and config.weights is None:
        yield "relay: there is nothing to pass on, add [weights]"
    if config.weights is not None and config.job:
        if "job" in config.weights.model_fields_set:
            yield "weights.job: the jobs are those of [[job]], leave it out"
        if all(job.weights for job in config.job):
            yield "weights: every [[job]] has a store of its own, leave it out"
    if config.scheduler.url is not None:
        if len(config.scheduler.model_fields_set) > 1:
            yield "scheduler.url: that one runs already, leave the other fields out"
        if config.weights is not None or config.job:
            yield "scheduler.url: that one has its own jobs, leave out [[job]] and [weights]"
    for number, section in enumerate(config.node):
        for field in SINGULAR:
            if section.devices is not None and _is_given(section, field):
                yield f"node.{number}.{field}: cannot be given beside `devices`"
    yield from _collisions(config)
    ports: dict[int, str] = {}
    for field, _, port in _ports(config):
        if port in ports:
            yield f"{field}: {port} is {ports[port]} already"
        ports[port] = field


def _is_given(section: NodeSection, field: str) -> bool:
    table, _, name = field.rpartition(".")
    holder = getattr(section, table) if table else section
    return holder is not None and name in holder.model_fields_set


def _collisions(config: ClusterConfig) -> Iterator[str]:
    """Of nodes with those before them."""
    placed: list[tuple[str, NodeSection]] = []
    for number, section in enumerate(config.node):
        field = f"node.{number}.{'device' if section.devices is None else 'devices'}"
        for node in section.each():
            for other, before in placed:
                if node.where.gpu is not None and node.where.gpu == before.where.gpu:
                    yield f"{field}: {node.device} is {other} already"
                if shared := sorted(set(node.where.cores) & set(before.where.cores)):
                    yield f"{field}: of {node.device}, cores {shared} are {other} already"
                if node.page_path == before.page_path:
                    yield f"node.{number}.page: {node.page_path} is that of {other} already"
                if node.rollout.model != before.rollout.model:
                    yield (
                        f"node.{number}.rollout.model: {node.rollout.model!r} beside "
                        f"{before.rollout.model!r}, but a scheduler's rollouts are of one model"
                    )
            placed.append((field, node))


def _ports(config: ClusterConfig) -> list[tuple[str, str, int]]:
    """Field, host and number of all that were given."""
    sections = {"scheduler": config.scheduler, "weights": config.weights, "relay": config.relay}
    found = [(f"{name}.port", HOST, one.port) for name, one in sections.items() if one is not None]
    for number, node in enumerate(config.node):
        found.append((f"node.{number}.port", node.host, node.port))
        for role, engine in node.engines.items():
            found.append((f"node.{number}.{role}.port", HOST, engine.port))
    return [(field, host, port) for field, host, port in found if port]


def check(config: ClusterConfig) -> None:
    """Refuse what this machine has no room for; models that have to be made are made."""
    _agreeing(config)
    _check_folder(config.folder)
    for field, host, port in _ports(config):
        bound(port, field, host).close()
    needed = {
        node.name: _memory(node, f"node.{number}")
        for number, section in enumerate(config.node)
        for node in section.each()
    }
    available = psutil.virtual_memory().available
    if sum(needed.values()) > available:
        parts = ", ".join(f"{name} {size / (1 << 30):.1f} GiB" for name, size in needed.items())
        raise ConfigError(
            f"node: kv_gb and the models do not fit beside each other: {parts} are needed, "
            f"{available / (1 << 30):.1f} GiB are available"
        )


def _check_folder(folder: Path) -> None:
    """Makes nothing: whoever is refused leaves nothing behind."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"folder: {folder}: {there} is not a folder that can be written to")
    if (folder / LOCK).exists():
        try:
            claim(folder / LOCK).close()
        except BlockingIOError:
            raise ConfigError(f"folder: {folder} is that of a cluster that runs") from None
        except OSError as error:
            raise ConfigError(f"folder: {folder / LOCK}: {error.strerror}") from error


def _memory(node: NodeSection, field: str) -> int:
    """Of this host, as `config.check_fits` counts it."""
    if node.where.gpu is not None:
        return 0
    needed = node.kv_total
    for role, engine in node.engines.items():
        try:
            weights = models.weight_bytes(models.resolve(engine.model), engine.dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field}.{role}.model: {error}") from error
        needed += weights + ENGINE_OVERHEAD
    return needed


def settle(
    config: ClusterConfig, secret: str = "", free: Callable[[int], list[int]] = free_ports
) -> ClusterConfig:
    """The same cluster with nothing left open: one node per device, every port a number.

    `secret`: the scheduler's.
    """
    nodes = [node for section in config.node for node in section.each()]
    given = {port for _, _, port in _ports(config)}
    ports = (port for port in free(3 + 3 * len(nodes) + len(given)) if port not in given)

    def with_port(section: dict[str, Any]) -> dict[str, Any]:
        return section | {"port": section.get("port") or next(ports)}

    content = config.model_dump(exclude_unset=True) | {"folder": config.folder.absolute()}
    for name in ("scheduler", "weights", "relay"):
        if getattr(config, name) is not None and config.scheduler.url is None:
            content[name] = with_port(content.get(name, {}))
    whole = ClusterConfig.model_validate(content)
    filled = []
    for node in nodes:
        said = node.model_dump(exclude_unset=True, exclude_none=True)
        if node.scheduler is None:
            said = {"scheduler_secret": secret} | said if secret else said
            said["scheduler"] = whole.scheduler_url
        said = {"log_dir": whole.logs / node.name} | with_port(said)
        filled.append(said | {role: with_port(said[role]) for role in node.engines})
    return ClusterConfig.model_validate(content | {"node": filled})
