"""`rose load`: the command line of the open-loop load generator."""

import asyncio
import json
import math
import signal
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rose.bench import arrivals, traces
from rose.bench.arrivals import Pattern, Request
from rose.bench.load import (
    VOCAB,
    LoadError,
    LoadResult,
    Progress,
    Prompts,
    connect,
    open_session,
    run,
)
from rose.bench.stats import Percentiles, Sample, Summary, percentile
from rose.executor.slo import Slo

MAX_REQUESTS = 2_000_000
"""More would fill this machine's memory with schedules and token times."""

LAG_WARNING_S = 0.05
"""A generator this late at p99 measures itself as much as the server."""

errors = Console(stderr=True, soft_wrap=True)


def load(
    url: Annotated[str, typer.Option(help="Server, such as http://127.0.0.1:8000.")],
    rate: Annotated[
        float | None, typer.Option(help="Mean requests per second. Default 1; a trace: its own.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds. Default 60; a trace: its own.")
    ] = None,
    pattern: Annotated[
        Pattern | None, typer.Option(help="Arrival law. Default poisson; trace with --trace.")
    ] = None,
    peak: Annotated[float, typer.Option(help="bursty: busiest second over the mean.")] = 4.0,
    cv: Annotated[float, typer.Option(help="gamma: coefficient of variation of gaps.")] = 2.0,
    trace: Annotated[
        Path | None, typer.Option(help="rose, Azure or BurstGPT CSV, or Mooncake JSONL; .gz too.")
    ] = None,
    trace_start: Annotated[float, typer.Option(help="trace: seconds to skip.")] = 0.0,
    skip_bad_rows: Annotated[bool, typer.Option(help="trace: leave out unusable rows.")] = False,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(help="N or lognormal:MEDIAN,SIGMA,CAP. Default 128; a trace: N is a cap."),
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(help="As --prompt-tokens. Default 64; a trace: N is a cap.")
    ] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Time to first token.")] = 500.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="Mean time per later token.")] = 150.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    model: Annotated[str | None, typer.Option(help="Default: ask /v1/models.")] = None,
    text: Annotated[bool, typer.Option(help="Words instead of token ids as prompts.")] = False,
    vocab: Annotated[str, typer.Option(help="LOW:HIGH range of prompt token ids.")] = (
        f"{VOCAB[0]}:{VOCAB[1]}"
    ),
    timeout: Annotated[float, typer.Option(help="Seconds after which a request failed.")] = 120.0,
    api_key: Annotated[str | None, typer.Option(envvar="ROSE_LOAD_API_KEY")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every request as JSON lines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Send open-loop load to an OpenAI-compatible server and judge it by its SLO."""
    for name, value, least in (
        ("rate", rate, 0.0),
        ("duration", duration, 0.0),
        ("slo-ttft-ms", slo_ttft_ms, 0.0),
        ("slo-tpot-ms", slo_tpot_ms, 0.0),
        ("timeout", timeout, 0.0),
        ("cv", cv, 0.0),
    ):
        if value is not None and not (math.isfinite(value) and value > least):
            refuse(f"--{name} is {value:g}: it must be a finite number above {least:g}")
    if not (math.isfinite(peak) and peak >= 1.0):
        refuse(f"--peak is {peak:g}: it must be a finite number of at least 1")
    if not (math.isfinite(trace_start) and trace_start >= 0.0):
        refuse(f"--trace-start is {trace_start:g}: it must be a finite number of at least 0")
    if seed < 0:
        refuse(f"--seed is {seed}: it must be at least 0")
    if not _is_http(url):
        refuse(f"--url {url!r} is no server address: give one such as http://127.0.0.1:8000")
    if out is not None and not out.parent.is_dir():
        refuse(f"--out {out}: the folder {out.parent} does not exist")
    prompts = Prompts(seed, _vocab(vocab), text)
    law = pattern or (Pattern.TRACE if trace else Pattern.POISSON)
    if (law is Pattern.TRACE) != (trace is not None):
        refuse(f"--pattern {law.value} and --trace go together only when the pattern is trace")
    if trace is not None:
        requests = _from_trace(
            trace, rate, duration, trace_start, skip_bad_rows, prompt_tokens, output_tokens
        )
    else:
        requests = _from_law(
            law, rate or 1.0, duration or 60.0, peak, cv, seed,
            prompt_tokens or "128", output_tokens or "64",
        )  # fmt: skip
    slo = Slo(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    try:
        result = asyncio.run(_session(url, model, api_key, requests, slo, prompts, timeout))
        if out is not None:
            result.write(out)
    except LoadError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--out {out} cannot be written: {error.strerror or error}")
    summary = result.summary()
    if as_json:
        print(json.dumps(asdict(summary), indent=2))
    else:
        show(summary, Console())
    if not any(s.error is None for s in result.samples):
        raise typer.Exit(1)


def show(summary: Summary, console: Console) -> None:
    """A table of what was measured and plain sentences about what to distrust."""
    table = Table(title="rose load", title_justify="left")
    for column in ("", "p50", "p90", "p99", "worst", "SLO"):
        table.add_column(column, justify="right" if column else "left")
    rows: tuple[tuple[str, Percentiles | None, float | None], ...] = (
        ("TTFT ms", summary.ttft, summary.slo.ttft_s),
        ("TPOT ms", summary.tpot, summary.slo.tpot_s),
        ("longest token gap ms", summary.max_gap, None),
        ("send lag ms", summary.lag, None),
    )
    for name, p, bound in rows:
        values = [f"{v * 1e3:.1f}" for v in (p.p50, p.p90, p.p99, p.worst)] if p else ["-"] * 4
        table.add_row(name, *values, f"{bound * 1e3:g}" if bound is not None else "")
    console.print(table)
    met = "-" if summary.attainment is None else f"{summary.attainment:.2%}"
    console.print(
        f"SLO met by {met} of {summary.requests} requests ({summary.failed} failed) in "
        f"{summary.span_s:.1f} s: {summary.rate:.2f} requests/s, "
        f"{summary.tokens_per_s:.1f} tokens/s."
    )
    if summary.cut or summary.unsent:
        console.print(
            f"Stopped early: {summary.cut} cut while running, {summary.unsent} never sent."
        )
    if summary.ttft and summary.ttft.p99_is_worst_of is not None:
        console.print(f"p99 is the worst of only {summary.ttft.p99_is_worst_of} requests.")
    if summary.lag and summary.lag.p99 > LAG_WARNING_S:
        console.print("The generator fell behind its schedule (send lag): lower --rate.")
    for error, count in sorted(summary.errors.items(), key=lambda item: -item[1])[:5]:
        console.print(f"{count} x {error}", markup=False)


def refuse(sentence: str) -> NoReturn:
    errors.print(sentence, markup=False, highlight=False)
    raise typer.Exit(2)


async def _session(
    url: str,
    model: str | None,
    api_key: str | None,
    requests: list[Request],
    slo: Slo,
    prompts: Prompts,
    timeout_s: float,
) -> LoadResult:
    stop, progress, ttfts = asyncio.Event(), Progress(), list[float]()

    def keep(sample: Sample) -> None:
        if sample.ttft_s is not None:
            insort(ttfts, sample.ttft_s)

    async with open_session(api_key) as session:
        target = await connect(session, url, model, prompts)
        with _interruptible(stop), _live(progress, ttfts):
            return await run(
                session,
                target,
                requests,
                slo=slo,
                prompts=prompts,
                timeout_s=timeout_s,
                on_sample=keep,
                progress=progress,
                stop=stop,
            )


@contextmanager
def _interruptible(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets `stop`; a second one ends the process as usual."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _live(progress: Progress, ttfts: list[float]) -> Iterator[None]:
    """One line that follows the run; nothing when nobody watches."""

    def line() -> Text:
        p99 = f"{percentile(ttfts, 0.99) * 1e3:.0f} ms" if ttfts else "-"
        return Text(
            f"sent {progress.sent}/{progress.total}  done {progress.done}  "
            f"running {progress.running}  TTFT p99 so far {p99}"
        )

    if not errors.is_terminal:
        yield
        return
    with Live(console=errors, get_renderable=line, refresh_per_second=4, transient=True):
        yield


def _from_law(
    law: Pattern,
    rate: float,
    duration: float,
    peak: float,
    cv: float,
    seed: int,
    prompt_tokens: str,
    output_tokens: str,
) -> list[Request]:
    if rate * duration > MAX_REQUESTS:
        refuse(f"--rate times --duration is {rate * duration:.0f} requests, above {MAX_REQUESTS}")
    prompt = _lengths("prompt-tokens", prompt_tokens)
    output = _lengths("output-tokens", output_tokens)
    rng = np.random.default_rng(seed)
    try:
        match law:
            case Pattern.BURSTY:
                times = arrivals.bursty(rate, duration, rng, peak)
            case Pattern.GAMMA:
                times = arrivals.gamma(rate, duration, rng, cv)
            case _:
                times = arrivals.poisson(rate, duration, rng)
    except ValueError as error:
        refuse(f"--peak {peak:g}: {error}")
    if not len(times):
        refuse(f"--rate {rate:g} for --duration {duration:g} s sends no request: raise one of them")
    return arrivals.schedule(times, prompt, output, rng)


def _from_trace(
    path: Path,
    rate: float | None,
    duration: float | None,
    start: float,
    skip_bad_rows: bool,
    prompt_cap: str | None,
    output_cap: str | None,
) -> list[Request]:
    caps = []
    for name, text in (("prompt-tokens", prompt_cap), ("output-tokens", output_cap)):
        law = _lengths(name, text) if text is not None else None
        if law is not None and not isinstance(law, arrivals.Fixed):
            refuse(f"--{name} {text}: with a trace it is a cap, so give a plain number")
        caps.append(law.tokens if law is not None else None)
    try:
        trace = traces.load(path, limit=MAX_REQUESTS)
        if trace.bad_rows and not skip_bad_rows:
            refuse(
                f"{len(trace.bad_rows)} unusable rows in the trace, the first {trace.bad_rows[0]}: "
                "mend them or pass --skip-bad-rows"
            )
        return traces.scale(
            trace.requests,
            rate=rate,
            duration=duration,
            max_prompt=caps[0],
            max_output=caps[1],
            start=start,
        )
    except traces.TraceError as error:
        refuse(f"--trace: {error}")


def _lengths(name: str, text: str) -> arrivals.Lengths:
    try:
        return arrivals.parse_lengths(text)
    except ValueError as error:
        refuse(f"--{name}: {error}")


def _vocab(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        refuse(f"--vocab {text!r} is no range: give LOW:HIGH such as {VOCAB[0]}:{VOCAB[1]}")
    return int(low), int(high)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
