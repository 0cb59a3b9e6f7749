"""Pauses before what died is started again."""

from __future__ import annotations

from rose.cluster.restarts import CALM_S, next_pause


def test_pauses_double_until_a_process_has_lived() -> None:
    pauses = [0.0]
    for _ in range(7):
        pauses.append(next_pause(pauses[-1], lived_s=1.0))
    assert pauses[1:] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert next_pause(30.0, lived_s=CALM_S) == 1.0
