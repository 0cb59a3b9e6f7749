from hypothesis import given
from hypothesis import strategies as st

from rose.executor.slo import Slo, first_token_deadline, next_token_deadline

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
gaps = st.lists(st.floats(0.001, 0.5), max_size=30)


def test_first_token_is_due_a_ttft_after_arrival() -> None:
    assert first_token_deadline(10.0, SLO) == 11.0


@given(gaps)
def test_without_credit_no_gap_is_longer_than_the_pace(seen: list[float]) -> None:
    """A cap of 0 is the paper's rule for a request that has not fallen behind."""
    last = 5.0 + sum(seen)
    due = next_token_deadline(5.0, last, len(seen) + 1, SLO, credit_cap_s=0.0)
    assert due <= last + SLO.tpot_s
    if sum(seen) <= len(seen) * SLO.tpot_s:
        assert due == last + SLO.tpot_s or abs(due - last - SLO.tpot_s) < 1e-9


@given(st.integers(1, 50), st.floats(0.0, 0.09), st.floats(0.0, 3.0))
def test_credit_grows_with_the_lead_up_to_the_cap(emitted: int, ahead: float, cap: float) -> None:
    last = 5.0 + (emitted - 1) * (SLO.tpot_s - ahead)
    lent = next_token_deadline(5.0, last, emitted, SLO, cap) - (last + SLO.tpot_s)
    assert abs(lent - min(cap, (emitted - 1) * ahead)) < 1e-9


@given(st.integers(2, 50), st.floats(0.001, 1.0), st.floats(0.0, 3.0))
def test_a_request_behind_its_pace_lends_nothing(emitted: int, behind: float, cap: float) -> None:
    last = 5.0 + (emitted - 1) * SLO.tpot_s + behind
    assert next_token_deadline(5.0, last, emitted, SLO, cap) < last + SLO.tpot_s


@given(gaps, st.floats(0.0, 3.0))
def test_tokens_at_their_deadlines_keep_the_mean_pace(seen: list[float], cap: float) -> None:
    first = last = 5.0
    emitted = 1
    for wait in seen:
        due = next_token_deadline(first, last, emitted, SLO, cap)
        last = min(due, last + wait)
        emitted += 1
        assert (last - first) / (emitted - 1) <= SLO.tpot_s + 1e-9
