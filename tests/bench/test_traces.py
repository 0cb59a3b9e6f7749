import gzip
import math
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rose.bench.arrivals import Request
from rose.bench.traces import TraceError, load, scale

SAMES = [Request(0.0, 10, 5), Request(1.5, 20, 6)]

FILES = {
    "rose.csv": "arrival_s,prompt_tokens,output_tokens\n3.0,10,5\n4.5,20,6\n",
    "azure2023.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,10,5\n2023-11-16 18:15:48.1805900,20,6\n"
    ),
    "azure2024.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.500000+00:00,10,5\n2024-05-10 00:00:02+00:00,20,6\n"
    ),
    "burst.csv": (
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,s,ChatGPT,10,5,15,API log\n6.5,s,GPT-4,20,6,26,API log\n"
    ),
    "mooncake.jsonl": (
        '{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
        '{"timestamp": 1500, "input_length": 20, "output_length": 6, "hash_ids": []}\n'
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("packed", [False, True])
def test_public_formats_are_read_by_column_name(tmp_path: Path, name: str, packed: bool) -> None:
    path = tmp_path / (name + ".gz" if packed else name)
    data = FILES[name].encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    trace = load(path)
    assert trace.bad_rows == ()
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(10, 5), (20, 6)]
    assert [r.arrival_s for r in trace.requests] == pytest.approx([0.0, 1.5])


def test_bad_rows_are_reported_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens\n"
        "1,10,5\nsoon,10,5\n2,0,5\n2,10\nnan,1,1\n2,1.5,1\n2.5,20,6\n"
    )
    trace = load(path)
    assert list(trace.requests) == SAMES
    assert [row.line for row in trace.bad_rows] == [3, 4, 5, 6, 7]
    assert str(trace.bad_rows[0]).startswith(f"{path}:3: ")
    assert "prompt_tokens is 0" in trace.bad_rows[1].why


def test_bad_json_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 10, "output_length": 5}\n{"timest\n[1]\n'
        '{"timestamp": 9, "input_length": 10}\n{"timestamp": [], "input_length": 1, '
        '"output_length": 1}\n'
    )
    assert [row.line for row in load(path).bad_rows] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "columns found are a, b"),
        ("", "columns found are none"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no usable request"),
        ("arrival_s,prompt_tokens,output_tokens\nx,1,1\n", "t.csv:2"),
    ],
)
def test_useless_files_are_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=says) as error:
        load(path)
    assert str(path) in str(error.value)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    short = gzip.compress(FILES["rose.csv"].encode() * 50)[:-20]
    (tmp_path / "short.csv.gz").write_bytes(short)
    for name in ("missing.csv", "broken.csv.gz", "binary.csv", "short.csv.gz"):
        with pytest.raises(TraceError, match=name):
            load(tmp_path / name)


requests = st.lists(
    st.tuples(st.floats(0, 1e5), st.integers(1, 5000), st.integers(1, 5000)), min_size=1
).map(lambda rows: sorted((Request(*row) for row in rows), key=lambda r: r.arrival_s))


@given(requests, st.floats(0.1, 100), st.floats(0.01, 1.5), st.integers(1, 99), st.integers(1, 9))
@example([Request(2.2e-311, 1, 1)], 1.0, 1.0, 1, 1)
def test_scale_gives_the_rate_and_keeps_the_shape(
    given_requests: list[Request], rate: float, share: float, max_prompt: int, max_output: int
) -> None:
    count = math.ceil(share * len(given_requests))
    duration = count / rate
    if count > len(given_requests):
        with pytest.raises(TraceError, match="lower rate or duration"):
            scale(given_requests, rate=rate, duration=duration)
        return
    scaled = scale(
        given_requests, rate=rate, duration=duration, max_prompt=max_prompt, max_output=max_output
    )
    assert len(scaled) == count
    assert all(0 <= r.arrival_s <= duration * (1 + 1e-9) for r in scaled)
    assert all(r.prompt_tokens <= max_prompt and r.output_tokens <= max_output for r in scaled)
    source = [r.arrival_s for r in given_requests[:count]]
    if source[-1] > 0:
        shape = [t / source[-1] for t in source]
        assert [r.arrival_s / scaled[-1].arrival_s for r in scaled] == pytest.approx(shape)


@given(requests, st.floats(0, 2e5))
def test_scale_without_rate_only_cuts(given_requests: list[Request], start: float) -> None:
    rest = [r for r in given_requests if r.arrival_s >= start]
    if not rest:
        with pytest.raises(TraceError, match="no request at or after"):
            scale(given_requests, start=start)
        return
    assert [r.arrival_s + start for r in scale(given_requests, start=start)] == pytest.approx(
        [r.arrival_s for r in rest]
    )
