"""Recorded serving load: public trace formats read by column name, cut and rescaled.

Formats (plain or .gz): rose CSV (`arrival_s,prompt_tokens,output_tokens`), Azure 2023/2024,
BurstGPT, and Mooncake JSON lines. Columns may stand in any order with others between them.
Rows that cannot be used are values in the result, with file and line.
"""

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from rose.bench.arrivals import Request


class TraceError(Exception):
    """A trace that cannot be used, in one sentence for the user."""


@dataclass(frozen=True)
class BadRow:
    path: Path
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


@dataclass(frozen=True)
class Trace:
    """Usable requests, sorted, the first at time 0; and the rows that were not usable."""

    path: Path
    format: str
    requests: tuple[Request, ...]
    bad_rows: tuple[BadRow, ...]


def _stamp(value: Any) -> float:
    moment = datetime.fromisoformat(str(value).strip())
    # Azure 2023 stamps carry no zone; read all as UTC so that no local clock change enters.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True)
class Format:
    name: str
    columns: tuple[str, str, str]
    seconds: Callable[[Any], float]


FORMATS = (
    Format("rose", ("arrival_s", "prompt_tokens", "output_tokens"), float),
    Format("azure", ("timestamp", "contexttokens", "generatedtokens"), _stamp),
    Format("burstgpt", ("timestamp", "request tokens", "response tokens"), float),
    Format("mooncake", ("timestamp", "input_length", "output_length"), lambda ms: float(ms) / 1e3),
)


def load(path: Path, limit: int | None = None) -> Trace:
    """Read a trace, at most `limit` usable rows of it."""
    requests: list[Request] = []
    bad: list[BadRow] = []
    form: Format | None = None
    found: list[str] = []
    try:
        with open_text(path) as lines:
            for number, row in _rows(path, lines):
                if isinstance(row, str):
                    bad.append(BadRow(path, number, row))
                    continue
                if form is None:
                    found = list(row)
                    form = _detect(path, found)
                request = _request(form, row)
                if isinstance(request, str):
                    bad.append(BadRow(path, number, request))
                    continue
                requests.append(request)
                if limit is not None and len(requests) >= limit:
                    break
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, EOFError) as error:
        raise TraceError(f"{path} is not a readable CSV or JSON lines file: {error}") from error
    if form is None or not requests:
        first = f"; first problem: {bad[0]}" if bad else f", columns found: {found or 'none'}"
        raise TraceError(f"{path} holds no usable request{first}")
    requests.sort(key=lambda r: r.arrival_s)
    origin = requests[0].arrival_s
    shifted = tuple(replace(r, arrival_s=r.arrival_s - origin) for r in requests)
    return Trace(path, form.name, shifted, tuple(bad))


def scale(
    requests: Sequence[Request],
    *,
    rate: float | None = None,
    duration: float | None = None,
    max_prompt: int | None = None,
    max_output: int | None = None,
    start: float = 0.0,
) -> list[Request]:
    """Cut a window that begins at `start` and stretch its time evenly, keeping burst shape.

    With `rate`, the window is the first rate x duration requests (all of them without
    `duration`), which then span `duration`, so their mean rate is `rate`. Without `rate` time
    is untouched. Lengths above the caps become the caps.
    """
    rest = [r for r in requests if r.arrival_s >= start]
    if not rest:
        raise TraceError(f"the trace has no request at or after start={start:g} s")
    if rate is None:
        window = [r for r in rest if duration is None or r.arrival_s < start + duration]
        span = length = 1.0
        if not window:
            raise TraceError(f"the trace has no request within {duration:g} s of start={start:g} s")
    else:
        count = len(rest) if duration is None else max(1, round(rate * duration))
        if count > len(rest):
            raise TraceError(
                f"{rate:g} requests/s for {duration:g} s need {count} requests and the trace has "
                f"{len(rest)} after start={start:g} s: lower rate or duration"
            )
        window = rest[:count]
        span = _span(rest, count, start)
        length = count / rate if duration is None else duration
    return [
        Request(
            (r.arrival_s - start) / span * length if span > 0 else 0.0,
            min(r.prompt_tokens, max_prompt or r.prompt_tokens),
            min(r.output_tokens, max_output or r.output_tokens),
        )
        for r in window
    ]


def _span(rest: Sequence[Request], count: int, start: float) -> float:
    """From `start` to the request after the window, or one mean gap past the trace's end."""
    if count < len(rest):
        return rest[count].arrival_s - start
    last = rest[-1].arrival_s - start
    return last * count / (count - 1) if count > 1 else last


def open_text(path: Path) -> IO[str]:
    """Plain or gzip by its name, without a byte-order mark."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, lines: IO[str]) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """(line number, row by column name in lower case) or (line number, why it is unusable)."""
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                yield number, f"not JSON: {error.msg}"
                continue
            yield number, row if isinstance(row, dict) else "not a JSON object"
        return
    reader = csv.reader(lines)
    header = [column.strip().lower() for column in next(reader, [])]
    _detect(path, header)
    for cells in reader:
        if len(cells) == len(header):
            yield reader.line_num, dict(zip(header, cells, strict=True))
        elif cells:
            yield reader.line_num, f"{len(cells)} cells where the header has {len(header)}"


def _detect(path: Path, found: Sequence[str]) -> Format:
    for form in FORMATS:
        if set(form.columns) <= set(found):
            return form
    raise TraceError(
        f"{path} is no trace format rose knows: columns found are "
        f"{', '.join(found) or 'none'}; expected for example "
        f"{','.join(FORMATS[0].columns)}"
    )


def _request(form: Format, row: Mapping[str, Any]) -> Request | str:
    at, prompt, output = form.columns
    try:
        seconds = form.seconds(row[at])
        lengths = [float(row[prompt]), float(row[output])]
    except KeyError as error:
        return f"no field {error}"
    except (ValueError, TypeError, OverflowError):
        return f"not a number or time in {at}={row[at]!r}, {prompt}={row.get(prompt)!r}, " + (
            f"{output}={row.get(output)!r}"
        )
    if not math.isfinite(seconds):
        return f"{at} is {row[at]}"
    for column, length in zip((prompt, output), lengths, strict=True):
        if not (length >= 1 and length.is_integer()):
            return f"{column} is {row[column]}, not a whole number of at least 1"
    return Request(seconds, int(lengths[0]), int(lengths[1]))
