from pathlib import Path

import numpy as np
import pytest

from rose.bench.traces import TraceError
from rose.plan.workload.recorded import RateCurve, Recorded
from rose.plan.workload.traffic import Traffic

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def test_a_record_plays_on_its_own_clock_with_its_own_lengths() -> None:
    record = Traffic(np.array([0.0, 1.0, 5.0]), np.array([10, 20, 30]), np.array([1, 2, 3]), 8.0)
    played = Recorded(record).requests(6 / 16, 16.0, np.random.default_rng(0))
    assert played.arrival_s.tolist() == [0.0, 1.0, 5.0, 8.0, 9.0, 13.0]
    assert played.prompt.tolist() == [10, 20, 30] * 2
    assert played.output.tolist() == [1, 2, 3] * 2


def test_more_load_repeats_requests_and_less_leaves_some_out() -> None:
    record = Traffic(np.arange(1000.0), np.arange(1, 1001), np.ones(1000, np.int64), 1000.0)
    for rate in (0.3, 2.5):
        played = Recorded(record).requests(rate, 1000.0, np.random.default_rng(1))
        assert played.rate == pytest.approx(rate, rel=0.1)
        assert np.array_equal(played.prompt, played.arrival_s + 1)
        assert np.bincount(played.arrival_s.astype(int)).max() == np.ceil(rate)


def test_bad_rows_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "0,10,5\nsoon,10,5\n2,0,5\n3,20,6\n")
    with pytest.raises(TraceError, match=r"2 unusable rows.*t\.csv:3: "):
        Recorded.read(path)
    found = Recorded.read(path, skip_bad_rows=True)
    assert [row.line for row in found.bad_rows] == [3, 4]
    assert found.traffic.prompt.tolist() == [10, 20]


def test_rates_are_kept_in_proportion_window_by_window(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("window_start_s,a_rps,b_rps\n600,1,3\n700,4,0\n800,1,3\n")
    law = RateCurve.read(path, "a")
    assert law.span_s == 300.0
    assert law.mean_rate == pytest.approx(2.0)
    counts = np.histogram(law.times(50.0, 600.0, np.random.default_rng(0)), 6, (0, 600))[0]
    assert counts / 5000.0 == pytest.approx([0.5, 2.0, 0.5] * 2, rel=0.1)
    later = RateCurve.read(path, "b_rps", start_s=150.0)
    counts = np.histogram(later.times(50.0, 300.0, np.random.default_rng(0)), 6, (0, 300))[0]
    assert counts / 2500.0 == pytest.approx([0, 1.5, 1.5, 1.5, 1.5, 0], rel=0.1)


def test_an_unknown_column_is_one_sentence_that_names_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("window_start_s,a_rps,b_rps\n0,1,3\n")
    with pytest.raises(TraceError, match=r"r\.csv has no column 'c': there are a_rps, b_rps"):
        RateCurve.read(path, "c")


def test_bad_windows_are_refused_unless_skipped(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("window_start_s,a_rps\n0,1\n60,-1\n120,3\n")
    with pytest.raises(TraceError, match=r"1 unusable rows.*r\.csv:3: a_rps is -1"):
        RateCurve.read(path, "a")
    assert RateCurve.read(path, "a", skip_bad_rows=True).mean_rate == pytest.approx(2.0)
