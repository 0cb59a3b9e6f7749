"""Recorded request rates: `window_start_s` and one `*_rps` column per service, as of ServeGen.

Columns are found by name (plain or .gz CSV). A window lasts until the next one begins. Rows that
cannot be used are values in the result, with file and line.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rose.bench.arrivals import Times
from rose.bench.traces import BadRow, TraceError, open_text

BEGIN = "window_start_s"
RATE = "_rps"


@dataclass(frozen=True, eq=False)
class Rates:
    """Windows in order and the requests per second in each, by column; rows not usable."""

    path: Path
    begins_s: Times
    by_column: Mapping[str, Times]
    bad_rows: tuple[BadRow, ...]

    def column(self, name: str) -> Times:
        """By its name, with or without `_rps`."""
        for found, rates in self.by_column.items():
            if name.lower() in (found, found.removesuffix(RATE)):
                return rates
        raise TraceError(
            f"{self.path} has no column {name!r}: there are {', '.join(self.by_column)}"
        )


def load(path: Path) -> Rates:
    rows: list[list[float]] = []
    bad: list[BadRow] = []
    try:
        with open_text(path) as lines:
            reader = csv.reader(lines)
            header = [column.strip().lower() for column in next(reader, [])]
            columns = _columns(path, header)
            for cells in reader:
                if not cells:
                    continue
                row = _row(header, columns, cells, rows)
                if isinstance(row, str):
                    bad.append(BadRow(path, reader.line_num, row))
                else:
                    rows.append(row)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error, EOFError) as error:
        raise TraceError(f"{path} is not a readable CSV file: {error}") from error
    if not rows:
        first = f"; first problem: {bad[0]}" if bad else ""
        raise TraceError(f"{path} holds no usable window{first}")
    table = np.asarray(rows, np.float64).T
    by_column = dict(zip(columns[1:], table[1:], strict=True))
    return Rates(path, table[0], by_column, tuple(bad))


def _columns(path: Path, header: Sequence[str]) -> list[str]:
    rates = [column for column in header if column.endswith(RATE)]
    if BEGIN in header and rates:
        return [BEGIN, *rates]
    raise TraceError(
        f"{path} holds no rates rose knows: columns found are {', '.join(header) or 'none'}; "
        f"expected {BEGIN} and at least one that ends in {RATE}"
    )


def _row(
    header: Sequence[str], columns: Sequence[str], cells: Sequence[str], before: list[list[float]]
) -> list[float] | str:
    if len(cells) != len(header):
        return f"{len(cells)} cells where the header has {len(header)}"
    text = dict(zip(header, cells, strict=True))
    values = []
    for column in columns:
        try:
            value = float(text[column])
        except ValueError:
            return f"{column} is {text[column]!r}, not a number"
        if not (math.isfinite(value) and (column == BEGIN or value >= 0.0)):
            return f"{column} is {text[column]}, not a rate or time"
        values.append(value)
    if before and values[0] <= before[-1][0]:
        return f"{BEGIN} is {text[BEGIN]}, not after the window before it"
    return values
