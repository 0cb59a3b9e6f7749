"""The error budget of lending: serving requests that rollout steps may make late, in expectation.

Every serving request that arrives earns a small share of one late request (0.005 allows one in two
hundred); a rollout step that is not provably safe spends its expected number of late requests, see
`admission`. What is spent never exceeds what was earned, so over any long time the expected share
of requests that lending makes late stays below `share`. A share of 0 earns nothing. A few requests'
earnings are there at once: without any, nothing could be lent before the first one comes.
"""

from __future__ import annotations

SAVED_REQUESTS = 200
"""Requests whose earnings may be saved up. More and one bad minute could hold all late requests of
a quiet day; fewer and a step that is seldom possible could never be paid. At a share of 0.005 this
is one late request."""
FIRST_REQUESTS = 5
"""Requests whose earnings a new budget has."""


class ErrorBudget:
    """Expected late requests that may still be spent. Not thread-safe; one per rollout engine."""

    def __init__(self, share: float = 0.0) -> None:
        self.share = self._saved = 0.0
        self._arrived: int | None = None
        self.allow(share)

    def allow(self, share: float) -> None:
        """From now on; the first share, also after none, brings its first earnings."""
        if share and not self.share:
            self._saved = share * FIRST_REQUESTS
        self.share = share

    @property
    def left(self) -> float:
        return min(self._saved, self.share * SAVED_REQUESTS)

    def earn(self, arrived: int) -> None:
        """`arrived`: serving requests since its engine started; fewer than last time: it restarted.

        The first count only says where counting begins: who restarts has not earned it all anew.
        """
        if self._arrived is None:
            self._arrived = arrived
        new = arrived - self._arrived if arrived >= self._arrived else arrived
        self._arrived = arrived
        self._saved = min(self._saved + self.share * new, self.share * SAVED_REQUESTS)

    def spend(self, risk: float) -> None:
        self._saved -= risk
