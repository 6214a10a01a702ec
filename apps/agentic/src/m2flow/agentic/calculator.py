"""The calculator: one sum, difference or product of two whole numbers at a time."""

import re

__all__ = ["calculate"]

_EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")


def calculate(expression: str) -> str:
    """The value of an expression such as "12*5". Raises ValueError on anything else, longer expressions included."""
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        raise ValueError("want two whole numbers with + - or * between")
    a, b = int(found[1]), int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[found[2]])
