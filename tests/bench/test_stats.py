import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.bench.stats import (
    Sample,
    attainment,
    median_and_spread,
    p99_ratio,
    percentile,
    percentiles,
    summarise,
)
from rose.executor.slo import Slo

SLO = Slo(ttft_s=0.5, tpot_s=0.1)


def sample(
    scheduled: float = 1.0, times: tuple[float, ...] = (1.25, 1.3125), **rest: object
) -> Sample:
    fields: dict[str, object] = {
        "index": 0,
        "scheduled_s": scheduled,
        "sent_s": scheduled,
        "finish_s": times[-1] if times else scheduled,
        "prompt_tokens": 4,
        "output_tokens": len(times),
        "token_s": times,
    }
    return Sample(**(fields | rest))  # type: ignore[arg-type]


def test_latencies_count_from_the_schedule() -> None:
    late = sample(1.0, (2.0, 2.1, 2.5), sent_s=1.75)
    assert late.lag_s == 0.75
    assert late.ttft_s == 1.0
    assert late.tpot_s == pytest.approx(0.25)
    assert late.max_gap_s == pytest.approx(0.4)


def test_tokens_the_times_do_not_show_count_for_tpot() -> None:
    assert sample(1.0, (1.5, 2.5), output_tokens=11).tpot_s == pytest.approx(0.1)


def test_one_token_has_no_pace_and_is_judged_by_ttft_alone() -> None:
    single = sample(1.0, (1.4,))
    assert single.tpot_s is None
    assert single.max_gap_s is None
    assert single.meets(SLO)


@pytest.mark.parametrize(
    ("one", "met"),
    [
        (sample(), True),
        (sample(1.0, (1.6, 1.7)), False),
        (sample(1.0, (1.2, 1.5)), False),
        (sample(error="HTTP 503: busy"), False),
        (sample(times=()), False),
    ],
)
def test_slo_needs_an_answer_in_time_and_at_pace(one: Sample, met: bool) -> None:
    assert one.meets(SLO) is met


def test_failures_count_against_attainment_but_not_in_latencies() -> None:
    summary = summarise([sample(), sample(times=(), error="boom")], SLO, span_s=2.0, cut=3)
    assert summary.attainment == 0.5
    assert (summary.requests, summary.failed, summary.cut) == (2, 1, 3)
    assert summary.errors == {"boom": 1}
    assert summary.ttft is not None
    assert summary.ttft.count == 1


def test_nothing_measured_is_none_not_zero() -> None:
    summary = summarise([], SLO, span_s=0.0)
    assert summary.attainment is None
    assert summary.ttft is None
    assert attainment([], SLO) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_percentile_is_a_sample_with_enough_below_it(values: list[float], q: float) -> None:
    ordered = sorted(values)
    value = percentile(ordered, q)
    assert value in ordered
    assert sum(v <= value for v in ordered) >= q * len(ordered) - 1e-6


def test_a_p99_of_few_says_so() -> None:
    few, many = percentiles(range(99)), percentiles(range(100))
    assert few is not None
    assert (few.p99, few.p99_is_worst_of) == (98, 99)
    assert many is not None
    assert (many.p99, many.p99_is_worst_of, many.worst) == (98, None, 99)


def test_median_and_spread() -> None:
    spread = median_and_spread([3.0, 1.0, 2.0, 4.0])
    assert (spread.median, spread.low, spread.high, spread.repeats) == (2.5, 1.0, 4.0, 4)
    assert spread.relative == pytest.approx(1.2)


def test_p99_ratio_says_how_little_it_rests_on() -> None:
    calm = [1.0 + i / 1000 for i in range(200)]
    same = p99_ratio(calm, calm)
    assert same.value == 1.0
    assert same.low < 1.0 < same.high < 1.01
    tail = p99_ratio([*calm[:-3], 2.0, 2.0, 2.0], calm)
    assert tail.value == pytest.approx(2.0 / calm[-3])
    assert tail.low < 1.01, "three of 200 might as well not have come"
    assert tail.high > 1.6
