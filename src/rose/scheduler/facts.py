"""What is known of engines: plain facts that placement and provisioning decide on."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

import msgspec

PLACES = 256
"""Turns at once of an engine that nobody has told of: vLLM's `--max-num-seqs` on most servers."""


class Standing(StrEnum):
    """Whether an engine may get turns."""

    READY = "ready"
    DRAINING = "draining"
    """It ends what it has and gets nothing new."""
    SUSPECT = "suspect"
    """It failed or stalled a moment ago."""
    DORMANT = "dormant"


@lru_cache(1024)  # asked for every engine whenever a turn is placed
def _slots(step_s: float, turn_s: float, places: int) -> int:
    most = places + max(1, round(AHEAD * places))
    return max(1, min(most, round(WORTH * step_s / max(turn_s, 1e-6))))


class Speed(msgspec.Struct, frozen=True):
    """A step with n turns takes about `step_s + turn_s * n`; a prompt token `prefill_s`."""

    step_s: float = 0.02
    turn_s: float = 0.002
    prefill_s: float = 0.0005

    def token_s(self, turns: int) -> float:
        """Between two tokens of a turn, with so many at once."""
        return self.step_s + self.turn_s * max(1, turns)

    def slots(self, places: int) -> int:
        """Turns beyond which one more hardly adds throughput, or would only wait."""
        return _slots(self.step_s, self.turn_s, places)


class EngineFacts(msgspec.Struct, frozen=True):
    """An engine as a policy sees it."""

    id: str
    borrowed: bool = False
    standing: Standing = Standing.READY
    running: int = 0
    """Turns placed there that have not ended."""
    prefill_left: int = 0
    """Prompt tokens of those that have not sent anything yet, without cached ones."""
    context: int = 0
    """Tokens that those turns hold, and are expected to."""
    capacity: int = 1 << 30
    """Tokens of KV memory."""
    speed: Speed = Speed()
    revoked_per_s: float = 0.0
    """How often turns are cut there, lately."""
    version: str = ""
    places: int = PLACES
    """Turns that it runs at once."""
    gpus: int = 1
    """That it takes."""

    @property
    def slots(self) -> int:
        return self.speed.slots(self.places)


AHEAD = 0.125
"""Of an engine's places: so many turns more, at least one, so that a place that becomes free is
taken in the next step. The rest waits here, where it can still go elsewhere."""
WORTH = 9.0
"""At 9 times step_s / turn_s turns a step is nine tenths their own work: another one adds about a
tenth of its share, and makes all the others slower."""
