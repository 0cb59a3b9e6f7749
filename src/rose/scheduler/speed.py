"""How fast is an engine? Fitted online to the gaps between tokens and to times to the first one.

The gap between two tokens of a turn grows with the turns beside it: `step_s + turn_s * n`, least
squares with old samples fading. What serving takes of a borrowed device is in it too.
"""

from __future__ import annotations

from rose.scheduler.facts import Speed

FADING = 0.995
"""Per sample: some hundred samples are remembered."""
PRIOR_SAMPLES = 8.0
"""Weight of the first guess, against samples."""
LEAST_STEP_S, LEAST_TURN_S, LEAST_PREFILL_S = 1e-4, 1e-6, 1e-7


class Meter:
    def __init__(self, first: Speed = Speed()) -> None:  # noqa: B008 (frozen)
        self._first = first
        seen = [(1.0, n, first.token_s(n), n * n, n * first.token_s(n)) for n in (1, 16)]
        self._sums = [PRIOR_SAMPLES / 2 * sum(each) for each in zip(*seen, strict=True)]
        """Of weights, turns, seconds, turns squared, turns times seconds."""
        self._prefill_s = first.prefill_s
        self.speed = first

    def gap(self, turns: int, seconds: float, times: int = 1) -> None:
        """Between two tokens of a turn, with so many at once; seen so many times."""
        weight, x, y, xx, xy = self._sums
        squared, product = turns * turns, turns * seconds
        for _ in range(times):
            weight = FADING * weight + 1.0
            x = FADING * x + turns
            y = FADING * y + seconds
            xx = FADING * xx + squared
            xy = FADING * xy + product
        self._sums = [weight, x, y, xx, xy]
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 else self._first.turn_s
        slope = max(LEAST_TURN_S, min(slope, y / x))
        base = max(LEAST_STEP_S, (y - slope * x) / weight)
        self.speed = Speed(base, slope, self._prefill_s)

    def first(self, tokens: int, seconds: float) -> None:
        """Time to the first token of a turn with so many uncached ones and nobody before it."""
        if tokens > 0:
            per_token = max(LEAST_PREFILL_S, (seconds - self.speed.step_s) / tokens)
            self._prefill_s += 0.1 * (per_token - self._prefill_s)
            self.speed = Speed(self.speed.step_s, self.speed.turn_s, self._prefill_s)
