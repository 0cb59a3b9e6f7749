"""How long to wait before a process that died is started again."""

from __future__ import annotations

FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
CALM_S = 60.0
"""A process that lived this long did not die of how it was started."""


def next_pause(last_s: float, lived_s: float) -> float:
    """The pause after a process lived for `lived_s`; `last_s` is 0 before its first end."""
    if not last_s or lived_s >= CALM_S:
        return FIRST_PAUSE_S
    return min(MOST_PAUSE_S, 2 * last_s)
