"""A node whose rollout engine is not pre-deployed: what elasticity costs without rose.

While the device is not borrowed there is no rollout engine. Whoever borrows it waits until one has
started, has been warmed up and has its weights, as with spot or serverless devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import psutil

from rose.cluster.config import NodeConfig
from rose.cluster.node import Node


class ColdNode(Node):
    """A plain node, until it gives the device back engine and all."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config)
        self._gone = False
        """There is no engine."""
        self._starting: asyncio.Task[None] | None = None
        self.starts_cpu_s = 0.0
        """CPU time of all engines' processes until they took turns."""

    async def give_back(self) -> None:
        """The next `activate` starts an engine."""
        await self.revoke()
        assert self.rollout is not None
        if not self._gone:
            self._gone = True
            self._reviving.add("rollout")  # nobody else starts it
            await self.rollout.stop(also=self.core("rollout"), gently=False)

    async def warm_up(self) -> None:
        """As other nodes again."""
        if self._starting is not None:
            await self._starting
        if self._gone:
            await self._start_engine()

    async def activate(self) -> float:
        if self._starting is None and not self._gone:
            return await super().activate()
        if self._starting is None:  # the scheduler hears that it is done when it is
            self._starting = asyncio.create_task(self._start_and_activate())
        return 0.0

    async def revoke(self) -> float:
        if self._starting is not None:
            await self._starting
        return 0.0 if self._gone else await super().revoke()

    async def stop(self, spare: Collection[str] = ()) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await super().stop(spare)

    async def _start_and_activate(self) -> None:
        try:
            await self._start_engine()
        finally:
            self._starting = None

    async def _warm_up(self) -> None:
        """For a borrower who waits: it takes turns from its first steps on."""
        if self._starting is None:
            await super()._warm_up()
        else:
            await super().activate()

    async def _start_engine(self) -> None:
        assert self.rollout is not None
        self._gone = False
        try:
            await self._restart("rollout", self.rollout)
            self.starts_cpu_s += sum(_cpu_seconds(one) for one in self.rollout.family())
        finally:
            self._reviving.discard("rollout")


def _cpu_seconds(process: psutil.Process) -> float:
    """With those of its children that have ended."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0
