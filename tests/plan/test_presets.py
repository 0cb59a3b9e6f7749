"""The paper's settings: what the issue asks for holds, on the smaller of its two testbeds."""

from __future__ import annotations

import pytest

from rose.plan import presets


@pytest.mark.parametrize("name", ["paper-8b-grpo", "paper-8b-dapo"])
def test_throughputs_are_the_papers_within_a_fifth_and_the_order_is_right(name: str) -> None:
    rows = presets.compare(presets.preset(name))
    found = presets.ratios(rows)
    assert found["throughput_error_max"] <= 0.2
    assert found["blind_throughput_error_max"] <= 0.2
    assert found["order_right"] is True


def test_every_preset_has_its_testbed() -> None:
    assert {name.split("-")[1] for name in presets.NAMES} == set(presets.BEDS) == set(presets.KEPT)


def test_every_free_parameter_says_where_it_is_from() -> None:
    words = ("FITTED", "CHOSEN", "paper", "public", "default", "report", "marked")
    for parameter, source in presets.FREE.items():
        assert any(word in source for word in words), parameter
