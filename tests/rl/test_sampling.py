from hypothesis import given
from hypothesis import strategies as st

from rose.rl.sampling import next_round


def test_the_first_round_is_what_is_wanted() -> None:
    assert next_round(wanted=16, found=0, tried=0, most=80) == 16


def test_later_rounds_go_by_what_was_of_use() -> None:
    assert next_round(wanted=16, found=7, tried=15, most=80) == 18
    assert next_round(wanted=16, found=16, tried=40, most=80) == 0


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 2000), st.integers(1, 2000))
def test_no_more_than_the_limit_is_tried(wanted: int, found: int, tried: int, most: int) -> None:
    found, tried = min(found, tried), min(tried, most)
    asked = next_round(wanted, found, tried, most)
    assert 0 <= asked <= most - tried
    assert (asked == 0) == (found >= wanted or tried == most)
