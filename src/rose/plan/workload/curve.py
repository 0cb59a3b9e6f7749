"""A rate that changes in steps, and arrivals moved so that they follow it."""

from dataclasses import dataclass

import numpy as np

from rose.bench.arrivals import Times


@dataclass(frozen=True, eq=False)
class Curve:
    """The rate is `levels[i]` from `edges[i]` to `edges[i + 1]`, in any unit; edges begin at 0."""

    edges: Times
    levels: Times

    def warp(self, times: Times) -> Times:
        """Arrivals of an even rate over the curve's span, moved to where the curve has them.

        Their number stays, so the mean rate does too: only ratios of levels count. Time runs
        faster where the level is high, so a process that is not Poisson keeps its clumps.
        """
        area = np.concatenate(([0.0], np.cumsum(self.levels * np.diff(self.edges))))
        if not area[-1] > 0.0:
            raise ValueError("the rate is 0 from beginning to end")
        end = float(self.edges[-1])
        moved = np.interp(times, area * (end / area[-1]), self.edges)
        within: Times = np.minimum(moved, np.nextafter(end, 0.0))
        return within
