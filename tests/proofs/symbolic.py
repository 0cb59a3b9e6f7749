"""Real functions on unknown numbers: every path through them, and the condition that leads there.

A `Number` stands for any integer or real. It computes and compares like one, and what comes of it
are terms of z3. A comparison is a `Truth`; where the code branches on one, the solver is asked
which ways are possible, and `paths` runs the function once for each of them. So what is proved is
the code that runs, not a copy of it. Arithmetic is exact: rounding of floats is not modelled.

Infinity is no number to z3. `math.inf` stays a float, and every `Number` is finite: what it is to
infinity, zero is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, TypeVar

import z3

R = TypeVar("R")


class Path:
    """One run of a function: the way it goes at every branch."""

    def __init__(self, given: tuple[z3.BoolRef, ...], ways: list[bool]) -> None:
        self._solver = z3.Solver()
        self._solver.add(*given)
        self._planned = ways
        self._taken: list[bool] = []
        self.conditions: list[z3.BoolRef] = [z3.BoolVal(True)]
        self.others: list[list[bool]] = []
        """What other runs have to be planned to do."""

    def choose(self, condition: z3.BoolRef) -> bool:
        at = len(self._taken)
        if at < len(self._planned):
            way = self._planned[at]
        else:
            way = self._possible(condition)
            if way and self._possible(z3.Not(condition)):
                self.others.append([*self._taken, False])
        self._taken.append(way)
        self.conditions.append(condition if way else z3.Not(condition))
        self._solver.add(self.conditions[-1])
        return way

    def _possible(self, condition: z3.BoolRef) -> bool:
        return _decided(self._solver.check(condition)) == z3.sat


_running: list[Path] = []


def paths(run: Callable[[], R], *given: z3.BoolRef) -> Iterator[tuple[z3.BoolRef, R]]:
    """Everything that `run` can return, each with its condition; the conditions cover `given`."""
    planned: list[list[bool]] = [[]]
    while planned:
        path = Path(given, planned.pop())
        _running.append(path)
        try:
            result = run()
        finally:
            _running.pop()
        planned += path.others
        yield z3.And(path.conditions), result


def value(run: Callable[[], Any], *given: z3.BoolRef) -> z3.ExprRef:
    """What `run` returns, as one term."""
    found = [(condition, term(result)) for condition, result in paths(run, *given)]
    merged = found.pop()[1]
    for condition, result in found:
        merged = z3.If(condition, result, merged)
    return merged


def counterexample(claim: z3.BoolRef, *given: z3.BoolRef) -> str | None:
    """Numbers for which the claim is wrong; None if it is proved."""
    solver = z3.Solver()
    solver.add(*given, z3.Not(claim))
    return f"wrong for {solver.model()}" if _decided(solver.check()) == z3.sat else None


def _decided(answer: z3.CheckSatResult) -> z3.CheckSatResult:
    if answer == z3.unknown:
        raise RuntimeError("z3 gave up")
    return answer


def term(value: Any) -> z3.ExprRef:
    if isinstance(value, Number):
        return value.term
    if isinstance(value, Truth):
        return value.formula
    if isinstance(value, bool):
        return z3.BoolVal(value)
    return z3.IntVal(value) if isinstance(value, int) else z3.RealVal(Fraction(value))


def _endless(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _divided(left: z3.ArithRef, right: z3.ArithRef) -> z3.ArithRef:
    assert left.is_int() and right.is_int()
    return left / right


def _arithmetic(how: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: Number, other: Any) -> Any:
        return how(0.0, other) if _endless(other) else Number(how(self.term, term(other)))

    def backward(self: Number, other: Any) -> Any:
        return how(other, 0.0) if _endless(other) else Number(how(term(other), self.term))

    return forward, backward


def _comparison(how: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def compare(self: Number, other: Any) -> Any:
        return how(0.0, other) if _endless(other) else Truth(how(self.term, term(other)))

    return compare


class Truth:
    """A comparison that is decided where somebody branches on it."""

    def __init__(self, formula: z3.BoolRef) -> None:
        self.formula = formula

    def __bool__(self) -> bool:
        return _running[-1].choose(self.formula)

    def __radd__(self, other: int) -> int:
        return other + bool(self)


class Number:
    def __init__(self, term: z3.ArithRef) -> None:
        self.term = term

    __add__, __radd__ = _arithmetic(operator.add)
    __sub__, __rsub__ = _arithmetic(operator.sub)
    __mul__, __rmul__ = _arithmetic(operator.mul)
    __floordiv__, __rfloordiv__ = _arithmetic(_divided)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def __neg__(self) -> Number:
        return Number(-self.term)

    def __bool__(self) -> bool:
        return bool(self != 0)


def lowest(*numbers: Any, **more: Any) -> Any:
    """`min`, for modules that use it on unknown numbers; one term instead of two paths."""
    return _chosen(min, operator.le, numbers, more)


def highest(*numbers: Any, **more: Any) -> Any:
    """`max`, likewise."""
    return _chosen(max, operator.ge, numbers, more)


def _chosen(
    builtin: Callable[..., Any], first: Callable[..., Any], numbers: tuple[Any, ...], more: Any
) -> Any:
    known = [number for number in numbers if not isinstance(number, Number)]
    unknown = [number.term for number in numbers if isinstance(number, Number)]
    if not unknown:
        return builtin(*numbers, **more)
    if known:
        best = builtin(known)
        if _endless(best):
            if first(best, 0.0):
                return best
        else:
            unknown.append(term(best))
    chosen = unknown.pop()
    for other in unknown:
        chosen = z3.If(first(other, chosen), other, chosen)
    return Number(chosen)


def whole(number: Any) -> Any:
    """`int`, for modules that use it on unknown numbers."""
    if not isinstance(number, Number):
        return int(number)
    if number < 0:
        return -whole(-number)
    return number if number.term.is_int() else Number(z3.ToInt(number.term))
