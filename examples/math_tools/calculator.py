"""A calculator for one line of arithmetic.

Knows expressions, and no models or agents. Text is read as a syntax tree of numbers and operators,
and never run."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

# what an assistant with this calculator is told
SYSTEM = "Solve the problem with the calculator. End with the result."
MOST_CALLS = 5  # of the model, for one problem
LONGEST = 100  # characters of an expression
LARGEST = 10**18  # number
LARGEST_EXPONENT = 8
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """Compute an expression of numbers, + - * / ^ and brackets, such as 12*7."""
    return shown(read(expression))


def shown(value: Fraction) -> str:
    """An integer, or a decimal of ten digits."""
    return str(value) if value.denominator == 1 else f"{float(value):.10g}"


def read(text: str) -> Fraction:
    """The exact value of an expression. ValueError, beginning with `Error: `, if it has none, or
    is too long or too large."""
    if len(text) > LONGEST:
        raise ValueError(f"Error: more than {LONGEST} characters")
    try:
        return _value(ast.parse(text.strip().replace("^", "**"), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("Error: division by 0") from None
    except (SyntaxError, UnicodeError, RecursionError, MemoryError):
        raise ValueError(f"Error: cannot read {text.encode(errors='replace').decode()}") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=number) if type(number) in (int, float) and number <= LARGEST:
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            one = _value(left)
            two = _value(right)
            if type(op) is ast.Pow and two not in range(LARGEST_EXPONENT + 1):
                raise ValueError(f"Error: exponent {shown(two)}")
            value = OPERATORS[type(op)](one, int(two) if type(op) is ast.Pow else two)
            if max(abs(value.numerator), value.denominator) > LARGEST:
                raise ValueError("Error: too large")
            return value
    raise ValueError(f"Error: cannot read {ast.unparse(node)}")
