"""Engines simple enough to be worked out by hand."""

from __future__ import annotations

from rose.executor.latency import Step
from rose.plan.engine import EngineModel


class Line:
    """A step takes `fixed` and so much for each token."""

    def __init__(self, fixed: float = 0.01, prompt: float = 0.0001, token: float = 0.001) -> None:
        self._fixed, self._prompt, self._token = fixed, prompt, token

    def mean(self, step: Step) -> float:
        if not step.tokens:
            return 0.0
        return self._fixed + self._prompt * step.prefill + self._token * step.decode

    def upper(self, step: Step) -> float:
        return 1.1 * self.mean(step)

    likely = upper


MODEL = EngineModel(Line(), kv_bytes=1000, budget=512, sequences=64)
