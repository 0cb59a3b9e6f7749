"""Control calls: what a trainer tells the one server it sees is told to all engines behind it.

They may be repeated: TRL posts again after an error, and an engine that has done it says so.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rose.scheduler.fleet import Engine
from rose.scheduler.frontdoor.errors import Wrong, answer, json, read_bytes
from rose.scheduler.service import Service
from rose.scheduler.weights import Source

log = logging.getLogger("rose.scheduler")

TO_ALL = (
    "pause",
    "resume",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
)
FROM_ONE = ("v1/models", "server_info", "version", "is_paused")


class _Where(msgspec.Struct):
    store: str
    job: str
    folder: str


class _Init(msgspec.Struct):
    """Of the backend `rose`; others have no such fields."""

    init_info: _Where


class _Version(msgspec.Struct):
    version: int


class _Update(msgspec.Struct):
    """Of the backend `rose`."""

    update_info: _Version


class Control:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._asked: dict[str, int] = {}
        """The version of an update that a job's trainer has begun."""

    async def to_all(self, request: Request, job: str, name: str) -> Response:
        body = await read_bytes(request) or None
        query = f"?{request.url.query}" if request.url.query else ""
        if name == "finish_weight_update":
            body = self._with_version(job, body)
        leader, source = self._service.leader, None
        before = leader.sources.get(job)
        if name == "init_weight_transfer_engine" and (source := _source(body)) is not None:
            leader.follow(job, source)  # engines that come later are told the same
        async with self._service.updates:
            if name == "start_weight_update":
                leader.hold(job)
            elif name == "pause":
                leader.paused.add(job)
            answers = await self._service.everybody(job, "POST", f"/{name}{query}", body)
        if not any(status < 400 for _, status, _ in answers):
            if name in ("start_weight_update", "update_weights"):  # nobody is in an update now
                leader.release(job)
            if source is not None:
                leader.follow(job, before)
        if not answers:
            raise Wrong(503, f"no engine of job {job} is there", "ServiceUnavailableError")
        failed = [(engine, status, data) for engine, status, data in answers if status >= 400]
        done = [(engine, data) for engine, status, data in answers if status < 400]
        if failed:
            engine, status, data = failed[0]
            said = data.decode(errors="replace")[:500]
            refused = f"{len(failed)} of {len(answers)} engines refuse /{name}: {said}"
            if not done or job not in leader.sources:
                return answer(status, refused)
            log.warning(refused, extra={"facts": {"engine": engine.id}})  # it will be led there
        if source is not None:
            for engine, _ in done:
                engine.source = source.where
        elif name == "update_weights":
            with contextlib.suppress(msgspec.DecodeError):
                self._asked[job] = msgspec.json.decode(
                    body or b"", type=_Update
                ).update_info.version
        elif name == "finish_weight_update":
            self._note_version(job, body, [engine for engine, _ in done])
            leader.release(job)
        elif name == "resume":
            leader.paused.discard(job)
        return Response(done[0][1], media_type="application/json")

    def _with_version(self, job: str, body: bytes | None) -> bytes | None:
        """TRL finishes an update without naming it: then it is the version that was asked for."""
        asked = self._asked.pop(job, None)
        if asked is None or _version(body):
            return body
        return msgspec.json.encode({"weight_version": str(asked)})

    def _note_version(self, job: str, body: bytes | None, engines: list[Engine]) -> None:
        """Of those that have it; an engine that could not be reached is what it was."""
        version = _version(body)
        for engine in engines:
            engine.version = version
        if version.isdigit():
            self._service.core.jobs[job].lead(int(version))

    async def from_one(self, request: Request, job: str, name: str) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        status, data = await self._service.ask(job, "GET", f"/{name}{query}", None)
        return Response(data, status, media_type="application/json")

    async def world_size(self, job: str) -> Response:
        """All ranks of all engines: what a trainer that broadcasts would have to reach."""
        answers = await self._service.everybody(job, "GET", "/get_world_size", None)
        sizes = [
            msgspec.json.decode(data)["world_size"] for _, status, data in answers if status == 200
        ]
        return json({"world_size": sum(sizes)})

    async def weight_info(self, job: str) -> Response:
        """The version that all have at least, and who is where."""
        where = {engine.id: engine.version for engine in self._service.engines_of(job)}
        return json({"weight_version": _oldest(list(where.values())), "engines": where})


def _version(body: bytes | None) -> str:
    try:
        said = msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return ""
    return str(said.get("weight_version") or "")


def _oldest(versions: list[Any]) -> Any:
    if versions and all(version.isdigit() for version in versions):
        return min(versions, key=int)
    return versions[0] if len(set(versions)) == 1 else None


def _source(body: bytes | None) -> Source | None:
    """Where engines find the job's versions, if they go there on their own."""
    try:
        said = msgspec.json.decode(body or b"", type=_Init).init_info
    except msgspec.DecodeError:
        return None
    return Source(said.store, said.job, said.folder)
