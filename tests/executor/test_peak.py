from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.executor.peak import OVER_S, Peak


def test_a_burst_is_expected_again_for_a_while_and_then_forgotten() -> None:
    peak = Peak()
    assert peak.of(100, 50.0) == 100
    assert peak.of(1, 50.0 + OVER_S) == 100
    assert peak.of(1, 50.0 + 1.99 * OVER_S) == 100
    assert peak.of(1, 50.0 + 2 * OVER_S) == 1


def test_after_a_long_silence_nothing_old_counts() -> None:
    peak = Peak()
    peak.of(100, 50.0)
    assert peak.of(1, 50.0 + 2 * OVER_S) == 1


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1.0)), max_size=100))
def test_looked_at_often_it_is_the_most_of_one_span_and_of_two_at_most(
    values: list[tuple[int, float]],
) -> None:
    peak, now = Peak(over_s=10.0), 0.0
    seen: list[tuple[int, float]] = []
    for value, wait in values:
        now += wait
        seen.append((value, now))
        most = peak.of(value, now)
        assert most >= max(v for v, at in seen if now - at < 10.0)
        assert most <= max(v for v, at in seen if now - at <= 2 * (10.0 + 1.0))
