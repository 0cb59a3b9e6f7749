"""Whole-number arithmetic for models: + - * and parentheses, and nothing else of Python.

An expression is parsed, never evaluated by Python; its length and every number on the way are
bounded, so that what a model writes cannot take long.
"""

from __future__ import annotations

import ast
import operator
import re

LONGEST = 120
"""Characters of an expression."""
LARGEST = 10**15
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
WRITTEN = re.compile(r"[0-9+\-*() ]+")


def calculate(expression: str) -> int:
    """Raises ValueError with a sentence for who wrote it."""
    if len(expression) > LONGEST:
        raise ValueError(f"The expression has more than {LONGEST} characters.")
    if not WRITTEN.fullmatch(expression):
        raise ValueError("An expression has whole numbers, + - * and parentheses.")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError("That is not an expression.") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError("An expression has whole numbers, + - * and parentheses.")
    if abs(value) > LARGEST:
        raise ValueError(f"Numbers are at most {LARGEST}.")
    return value
