"""How much of serving's prompts its prefix cache knew, by vLLM's own counters."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

QUERIED, FOUND = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True)
class PrefixHits:
    """Prompt tokens that were looked up, and that were found."""

    queried: int = 0
    found: int = 0

    def __add__(self, other: PrefixHits) -> PrefixHits:
        return PrefixHits(self.queried + other.queried, self.found + other.found)

    def __sub__(self, other: PrefixHits) -> PrefixHits:
        return PrefixHits(self.queried - other.queried, self.found - other.found)

    @property
    def rate(self) -> float | None:
        return self.found / self.queried if self.queried else None


def parse(metrics: str) -> PrefixHits:
    counted = {QUERIED: 0.0, FOUND: 0.0}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in counted:
                counted[sample.name] += sample.value
    return PrefixHits(int(counted[QUERIED]), int(counted[FOUND]))


async def read(session: aiohttp.ClientSession, url: str) -> PrefixHits:
    """Since the engine at `url` started."""
    async with session.get(f"{url}/metrics") as answer:
        answer.raise_for_status()
        return parse(await answer.text())
