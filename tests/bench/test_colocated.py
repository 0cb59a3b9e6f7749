"""Which requests count: those of the window, while the machine's host took no CPU time away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rose.bench.colocated import SAMPLE_S, STOLEN_S, Moment, Run, _serve
from rose.bench.hits import PrefixHits
from rose.bench.stats import Sample
from rose.bench.traffic import Sent, traffic
from rose.executor.facts import RolloutFacts, ServingFacts
from rose.executor.slo import Slo


def request(index: int, scheduled: float, finish: float) -> Sample:
    return Sample(index, scheduled, scheduled, finish, 8, 2, (finish - 0.1, finish))


def test_requests_during_a_theft_are_left_out() -> None:
    stolen = [0.0, 0.0, STOLEN_S, STOLEN_S, STOLEN_S * 1.5]
    moments = [
        Moment(i * SAMPLE_S, ServingFacts(), RolloutFacts(), at) for i, at in enumerate(stolen)
    ]
    before, within, around, after = (
        request(0, 0.0, SAMPLE_S),
        request(1, 1.2 * SAMPLE_S, 1.8 * SAMPLE_S),
        request(2, 0.5 * SAMPLE_S, 3 * SAMPLE_S),
        request(3, 2 * SAMPLE_S, 4 * SAMPLE_S),
    )
    run = Run("rose", 1.0, [before, within, around, after], moments=moments)
    assert run.undisturbed == [before, after]


def served(url: str) -> Run:
    """Two requests before the window and two in it."""
    node: Any = SimpleNamespace(serving=SimpleNamespace(url=url), core=lambda role: None)
    sent = [
        Sent(at, [7] * 10, 3, kind) for at, kind in ((0, "a"), (0.1, "b"), (0.6, "a"), (1, "b"))
    ]
    run = Run("serving_alone", 1.0)
    asyncio.run(_serve(node, run, traffic(sent, lead_s=0.5), 1.0, Slo(1.0, 1.0)))
    return run


def test_what_comes_before_the_window_is_sent_but_not_judged(fake_server: Any) -> None:
    run = served(fake_server.url)
    assert len(fake_server.bodies) == 4
    assert [round(sample.scheduled_s, 6) for sample in run.samples] == [0.1, 0.5]
    assert [run.kinds[sample.index] for sample in run.samples] == ["a", "b"]
    assert all(0.0 < sample.ttft_s < 0.5 for sample in run.samples if sample.ttft_s is not None)
    assert run.prefixes == PrefixHits(20, 10)
    assert 1.0 <= run.seconds < 1.5


def test_no_window_finds_what_another_has_cached(fake_server: Any) -> None:
    for _ in range(2):
        served(fake_server.url)
    salts = [body["cache_salt"] for body in fake_server.bodies]
    assert len(set(salts[:4])) == len(set(salts[4:])) == 1
    assert salts[0] != salts[4]
