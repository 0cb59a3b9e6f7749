"""Looks at the fleet while a job trains: who is lent, who serves what, how memory is split."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rose.net import bearer

LOOK_S = 1.0
TIMEOUT_S = 2.0
FILE = "fleet.jsonl"


@dataclass(frozen=True)
class Look:
    """The scheduler and the devices it uses, at one moment."""

    at: float
    waiting: int
    running: int
    dedicated: int
    """Devices of the job's own that take turns."""
    lent: int
    """Serving devices that take turns."""
    serving_requests: int
    """Running and waiting, on devices that serve."""
    slack_s: float | None
    """Least time that any of them has beyond what its requests need; None: nobody asks for any."""
    kv_total: int
    kv_serving: int
    kv_rollout: int
    """Bytes in use on devices that serve."""


@asynccontextmanager
async def watching(scheduler: str, out: Path, secret: str = "") -> AsyncIterator[None]:
    """Writes a line a second to `fleet.jsonl`."""
    task = asyncio.create_task(_watch(scheduler.rstrip("/"), out / FILE, bearer(secret)))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _watch(scheduler: str, path: Path, headers: dict[str, str]) -> None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            began = time.monotonic()
            # One that is away now is looked at again in a second; the gap shows in the picture.
            with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError):
                found = await look(session, scheduler, headers)
                with path.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
            await asyncio.sleep(max(0.0, began + LOOK_S - time.monotonic()))


async def look(
    session: aiohttp.ClientSession, scheduler: str, headers: dict[str, str] | None = None
) -> Look:
    status = await _get(session, f"{scheduler}/rose/v1/status", headers)
    engines = [one for one in status["engines"] if one["lease"] != "none"]
    pages = await asyncio.gather(*(_get(session, f"{one['id']}/page") for one in engines))
    serving = [page for page in pages if page["serving"] is not None]
    active = [page["serving"] is None for one, page in zip(engines, pages, strict=True)
              if one["lease"] == "active"]  # fmt: skip
    jobs = status["jobs"].values()
    return Look(
        at=time.time(),
        waiting=sum(job["waiting"] for job in jobs),
        running=sum(job["running"] for job in jobs),
        dedicated=sum(active),
        lent=len(active) - sum(active),
        serving_requests=sum(p["serving"]["running"] + p["serving"]["waiting"] for p in serving),
        slack_s=_slack(serving),
        kv_total=sum(page["kv_total"] for page in serving),
        kv_serving=sum(page["serving"]["kv_used"] for page in serving),
        kv_rollout=sum(page["rollout"]["kv_used"] for page in serving if page["rollout"]),
    )


def _slack(pages: list[dict[str, Any]]) -> float | None:
    """A deadline that is never is null on the page."""
    found = [
        page["serving"][deadline] - page["serving"]["written"] - page["serving"][needed]
        for page in pages
        for deadline, needed in (
            ("decode_deadline", "next_step_s"),
            ("prefill_deadline", "clear_s"),
        )
        if page["serving"][deadline] is not None
    ]
    return min(found, default=None)


async def _get(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None
) -> Any:
    async with session.get(url, headers=headers) as answer:
        answer.raise_for_status()
        return await answer.json()
