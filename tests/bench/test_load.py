import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.bench.arrivals import Request
from rose.bench.load import LoadError, LoadResult, Prompts, Target, connect, open_session, run
from rose.bench.stats import Sample
from rose.executor.slo import Slo

SLO = Slo(ttft_s=0.5, tpot_s=0.2)


def play(url: str, requests: list[Request], **options: Any) -> LoadResult:
    async def go() -> LoadResult:
        async with open_session() as session:
            target = await connect(session, url)
            return await run(session, target, requests, slo=SLO, **options)

    return asyncio.run(go())


def probe(url: str, prompts: Prompts | None = None) -> Target:
    async def go() -> Target:
        async with open_session() as session:
            return await connect(session, url, prompts=prompts)

    return asyncio.run(go())


def test_contract_every_request_is_answered_in_full(openai_url: str) -> None:
    seen: list[Sample] = []
    requests = [Request(0.05 * i, 8 + i, 4 + i) for i in range(6)]
    result = play(openai_url, requests, on_sample=seen.append)
    assert [s.error for s in result.samples] == [None] * 6
    assert [s.output_tokens for s in result.samples] == [r.output_tokens for r in requests]
    assert {s.finish_reason for s in result.samples} == {"length"}
    assert sorted(seen, key=lambda s: s.index) == list(result.samples)
    for sample in result.samples:
        assert len(sample.token_s) == sample.output_tokens
        assert list(sample.token_s) == sorted(sample.token_s)
        assert sample.scheduled_s <= sample.sent_s <= sample.token_s[0] <= sample.finish_s


def test_a_stalled_server_delays_no_later_send(fake_server: Any) -> None:
    # No answer before the last request is in: a closed loop would wait for ever.
    fake_server.scripts = [fake_server.Script(hold_until=12) for _ in range(12)]
    result = play(fake_server.url, [Request(0.05 * i, 4, 2) for i in range(12)], timeout_s=20.0)
    assert [s.error for s in result.samples] == [None] * 12
    first, last = result.samples[0], result.samples[-1]
    assert first.token_s[0] >= last.sent_s
    assert first.ttft_s is not None
    assert first.ttft_s >= last.scheduled_s - first.scheduled_s


def test_latency_counts_from_the_schedule_when_the_generator_is_late(fake_server: Any) -> None:
    class SlowPrompts(Prompts):
        def make(self, index: int, tokens: int) -> list[int] | str:
            time.sleep(0.2 * index)
            return super().make(index, tokens)

    requests = [Request(0.0, 4, 2), Request(0.0, 4, 2)]
    late = play(fake_server.url, requests, prompts=SlowPrompts()).samples[1]
    assert late.lag_s >= 0.2
    assert late.ttft_s is not None
    assert late.ttft_s >= late.lag_s


def test_failures_are_values_and_the_run_goes_on(fake_server: Any) -> None:
    script = fake_server.Script
    fake_server.scripts = [
        script(status=503),
        script(break_after=2),
        script(abort_after=2),
        script(error_after=2),
        script(stall_s=30.0),
        script(),
    ]
    result = play(fake_server.url, [Request(0.05 * i, 4, 6) for i in range(6)], timeout_s=1.5)
    errors = [s.error or "" for s in result.samples]
    assert errors[0] == "HTTP 503: scripted"
    assert errors[1]
    assert errors[2] == "the server ended it: abort"
    assert errors[3] == "error in the stream: scripted failure"
    assert errors[4] == "timeout after 1.5 s"
    assert errors[5] == ""
    summary = result.summary()
    assert summary.failed == 5
    assert summary.attainment is not None
    assert summary.attainment <= 1 / 6


def test_tokens_of_one_chunk_are_all_counted(fake_server: Any) -> None:
    fake_server.per_chunk = 3
    (sample,) = play(fake_server.url, [Request(0.0, 4, 8)]).samples
    assert sample.output_tokens == 8
    assert len(sample.token_s) == 8


def test_a_server_without_extras_is_counted_by_chunks(fake_server: Any) -> None:
    fake_server.takes_extras = False
    assert probe(fake_server.url).extras == {}
    (sample,) = play(fake_server.url, [Request(0.0, 4, 5)]).samples
    assert (sample.error, sample.output_tokens) == (None, 5)


def test_stopping_reports_what_was_measured(fake_server: Any) -> None:
    fake_server.scripts = [fake_server.Script(), fake_server.Script(stall_s=30.0)]
    requests = [Request(0.0, 4, 2), Request(0.01, 4, 2), Request(60.0, 4, 2)]

    async def go() -> LoadResult:
        stop = asyncio.Event()
        async with open_session() as session:
            target = await connect(session, fake_server.url)

            def end(sample: Sample) -> None:
                asyncio.get_running_loop().call_later(0.1, stop.set)

            return await run(session, target, requests, slo=SLO, on_sample=end, stop=stop)

    result = asyncio.run(go())
    assert [s.index for s in result.samples] == [0]
    assert (result.cut, result.unsent) == (1, 1)


def test_every_request_is_written_as_a_json_line(fake_server: Any, tmp_path: Path) -> None:
    result = play(fake_server.url, [Request(0.0, 4, 3), Request(0.01, 4, 3)])
    result.write(tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1]
    assert rows[0]["ttft_s"] == result.samples[0].ttft_s
    assert len(rows[0]["token_s"]) == 3


def test_prompts_depend_on_seed_and_index_only(fake_server: Any) -> None:
    assert Prompts(1).make(5, 20) == Prompts(1).make(5, 20)
    assert Prompts(1).make(5, 20) != Prompts(1).make(6, 20)
    assert set(Prompts(0, (7, 9)).make(0, 50)) == {7, 8}
    assert isinstance(Prompts(text=True).make(0, 3), str)


@pytest.mark.parametrize(
    "make_url", [lambda url: "http://127.0.0.1:9", lambda url: url + "/nowhere"]
)
def test_no_server_is_one_sentence(fake_server: Any, make_url: Callable[[str], str]) -> None:
    with pytest.raises(LoadError, match=make_url(fake_server.url)):
        probe(make_url(fake_server.url))
