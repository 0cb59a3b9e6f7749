import gzip
from pathlib import Path

import pytest

from rose.bench.rates import load
from rose.bench.traces import TraceError

TEXT = "Window_start_s, m_small_rps,what,m_large_rps\n0,1.5,x,20\n600,2.5,y,30\n"


@pytest.mark.parametrize("packed", [False, True])
def test_rates_are_read_by_column_name(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("r.csv.gz" if packed else "r.csv")
    path.write_bytes(gzip.compress(TEXT.encode()) if packed else TEXT.encode())
    found = load(path)
    assert found.bad_rows == ()
    assert found.begins_s.tolist() == [0.0, 600.0]
    assert found.column("m_large").tolist() == [20.0, 30.0]
    assert found.column("M_SMALL_RPS").tolist() == [1.5, 2.5]
    with pytest.raises(TraceError, match="no column 'what': there are m_small_rps, m_large_rps"):
        found.column("what")


def test_bad_rows_are_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("window_start_s,a_rps\n0,1\n10,many\n\n20,-1\n30\n0,1\n40,nan\n50,2\n")
    found = load(path)
    assert found.begins_s.tolist() == [0.0, 50.0]
    assert [row.line for row in found.bad_rows] == [3, 5, 6, 7, 8]
    assert str(found.bad_rows[0]) == f"{path}:3: a_rps is 'many', not a number"
    assert "not after the window before it" in found.bad_rows[3].why


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "columns found are none"),
        ("window_start_s,a\n0,1\n", "columns found are window_start_s, a"),
        ("a_rps\n1\n", "expected window_start_s"),
        ("window_start_s,a_rps\n", "no usable window"),
        ("window_start_s,a_rps\n0,x\n", "r.csv:2"),
    ],
)
def test_useless_files_are_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=says) as error:
        load(path)
    assert str(path) in str(error.value)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    for name in ("missing.csv", "broken.csv.gz", "binary.csv"):
        with pytest.raises(TraceError, match=name):
            load(tmp_path / name)
