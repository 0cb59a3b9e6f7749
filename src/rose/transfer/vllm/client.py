"""Drives an engine to a version over its HTTP routes (`VLLM_SERVER_DEV_MODE=1`)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from rose.transfer.errors import TransferError

ASK_SOON_S, ASK_FIRST_S, ASK_LAST_S = 0.03, 0.03, 0.25
"""Between two looks at whether all ranks have a version staged; each takes a moment of the engine,
so they become rarer until one says that it is about to; more often would slow that down."""


CALL_S = 300.0
"""An engine that has not answered a call for so long hangs."""


@dataclass(frozen=True)
class Updated:
    version: int
    staged_s: float
    """Until every rank had it staged, while generation went on."""
    stop_s: float
    """Until the step in flight had ended."""
    pause_s: float
    """From then until generation went on."""


class EngineClient:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")

    async def init(self, store: str, job: str, folder: str) -> None:
        info = {"store": store, "job": job, "folder": folder}
        await self._post("init_weight_transfer_engine", {"init_info": info})

    async def ranks(self, wanted: int | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._ask("rose_weights", [wanted])
        return found

    async def digests(self) -> list[list[Any]]:
        found: list[list[Any]] = await self._ask("rose_digests", [])
        return found

    async def version(self) -> str:
        async with self._session.get(f"{self._url}/weight_info") as answer:
            return str((await answer.json())["weight_version"])

    async def update(self, version: int, wait_s: float = 60.0) -> Updated:
        """Wait until all ranks have the version staged, then commit it in one short pause.

        Requests in flight go on afterwards with the KV they have. Whatever fails, the engine goes
        on with the version it had.
        """
        began = time.monotonic()
        await self.staged(version, wait_s)
        staged_s = time.monotonic() - began
        return replace(await self.commit(version), staged_s=staged_s)

    async def commit(self, version: int) -> Updated:
        """A version that all ranks have staged."""
        staged = time.monotonic()
        try:
            for failed in await asyncio.gather(
                self.pause(), self._arm(version), return_exceptions=True
            ):
                if failed is not None:
                    raise failed
            stopped = time.monotonic()
            await self._post("finish_weight_update", {"weight_version": str(version)})
        finally:
            await self.resume()
        ended = time.monotonic()
        return Updated(version, 0.0, stopped - staged, ended - stopped)

    async def pause(self) -> None:
        """Until `resume`; requests in flight are kept."""
        await self._post("pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._post("resume")

    async def staged(self, version: int, wait_s: float, *, newer: bool = False) -> int:
        """Until every rank has the version, or if you like a newer one, staged or committed; that
        version."""
        deadline, pause = time.monotonic() + wait_s, ASK_FIRST_S
        while True:
            ranks = await self.ranks(version)
            have = set.intersection(*({rank["staged"], rank["version"]} for rank in ranks))
            reached = max((each for each in have if each is not None), default=-1)
            if version in have or (newer and reached > version):
                return reached if newer else version
            if time.monotonic() > deadline:
                said = next((rank["error"] for rank in ranks if rank["error"]), "it did not come")
                raise TransferError(f"{self._url}: version {version} is not staged: {said}")
            soon = any(rank["soon"] for rank in ranks)
            await asyncio.sleep(ASK_SOON_S if soon else pause)
            pause = min(1.1 * pause, ASK_LAST_S)

    async def _arm(self, version: int) -> None:
        """Have all ranks hold it; generation need not have stopped for that."""
        await self._post("start_weight_update")
        try:
            await self._post("update_weights", {"update_info": {"version": version, "wait_s": 0}})
        except TransferError:
            await self._give_up()
            raise

    async def _give_up(self) -> None:
        """vLLM ends an update on a rank that raises, and on no other: let all of them raise."""
        try:
            await self._post("update_weights", {"update_info": {"give_up": True}})
        except TransferError:
            return

    async def _ask(self, method: str, args: list[Any]) -> Any:
        return (await self._post("collective_rpc", {"method": method, "args": args}))["results"]

    async def _post(self, route: str, body: dict[str, Any] | None = None) -> Any:
        """On a connection of its own: between versions the server would close an idle one, and not
        every call may be repeated."""
        headers, timeout = {"Connection": "close"}, aiohttp.ClientTimeout(total=CALL_S)
        async with self._session.post(
            f"{self._url}/{route}", json=body, headers=headers, timeout=timeout
        ) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise TransferError(f"{self._url}/{route}: {answer.status} {text[:500]}")
            return await answer.json()
