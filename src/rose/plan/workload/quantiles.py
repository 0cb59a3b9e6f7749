"""A law given by percentiles, for lengths, counts and seconds that no simple formula fits."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.random import Generator

from rose.bench.arrivals import Counts, Lengths, Times


@dataclass(frozen=True)
class Quantiles(Lengths):
    """Rows of (share, the value that this share does not exceed), both ascending.

    Between two rows the logarithm of the value is a line, or the value itself where the lower one
    is 0. Below the first row the first line goes on, down to 0; above the last the value stays.
    `rose.rl.environments.long_tail` reads its tables the same way.
    """

    rows: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares, values = zip(*self.rows, strict=True)
        rising = len(shares) > 1 and all(a < b for a, b in pairwise(shares))
        if not (rising and shares[0] >= 0.0 and shares[-1] <= 1.0):
            raise ValueError(f"shares {shares} are not two or more, rising within 0 to 1")
        if not (values[0] >= 0.0 and list(values) == sorted(values) and values[-1] < np.inf):
            raise ValueError(f"values {values} do not rise from 0 or more")

    def at(self, shares: Times) -> Times:
        table = np.asarray(self.rows, np.float64)
        above = np.clip(np.searchsorted(table[:, 0], shares), 1, len(table) - 1)
        low, high = table[above - 1, 0], table[above, 0]
        least, most = table[above - 1, 1], table[above, 1]
        part = np.minimum((shares - low) / (high - low), 1.0)
        ratio = np.divide(most, least, out=np.ones_like(most), where=least > 0.0)
        straight = most * np.maximum(part, 0.0)
        found: Times = np.where(least > 0.0, least * ratio**part, straight)
        return found

    def values(self, count: int, rng: Generator) -> Times:
        return self.at(rng.random(count))

    def array(self, count: int, rng: Generator) -> Counts:
        """Rounded, at least 1."""
        rounded: Counts = np.rint(self.values(count, rng)).astype(np.int64)
        return np.maximum(rounded, 1)
