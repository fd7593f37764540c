"""What a calculator with a memory can do: elementary arithmetic, linear equations, expansion of
products.

Knows expressions, and no models or agents. Text is read as a syntax tree of numbers, letters and
operators, and never run: sympy's own parser would evaluate Python."""

from __future__ import annotations

import ast
import functools
import math
import operator
import string

import sympy

# what an assistant with this calculator is told
SYSTEM = "Solve the problem with the tools. End with the result."
MAX_CALLS = 4  # of the model, for one problem
PARAMETERS = {
    "calculate": ("left", "operator", "right"),
    "solve": ("equation",),
    "expand": ("product",),
}
LONGEST = 100  # characters of an expression
LARGEST = 10**18  # number
LARGEST_EXPONENT = 8
MOST_TERMS = 500
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
SYNTAX = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


class Calculator:
    """One calculator: `solve` remembers what it found, and `calculate` knows it by its letter.

    Every method returns a line of text and raises ValueError, beginning with `Error: `, for what it
    cannot do."""

    def __init__(self) -> None:
        self.known: dict[str, sympy.Expr] = {}

    def calculate(self, left: float | str, operator: str, right: float | str) -> str:
        """Compute left + right, left - right, left * right or left / right. A number may be the
        letter of an unknown that was solved before."""
        if operator not in OPERATORS:
            raise ValueError(f"Error: operator {operator} is none of + - * /")
        values = [self._number(str(side)) for side in (left, right)]
        if operator == "/" and values[1] == 0:
            raise ValueError("Error: division by 0")
        return f"result: {shown(OPERATORS[operator](*values))}"

    def solve(self, equation: str) -> str:
        """Solve a linear equation with one unknown, such as 3*x+5=20. The value is remembered by
        its letter."""
        letter, value = root_of(equation)
        self.known[letter] = value
        return f"{letter}: {shown(value)}"

    def expand(self, product: str) -> str:
        """Multiply out a product, such as 4*(x+3), and collect like terms."""
        return f"result: {expanded(product)}"

    def _number(self, text: str) -> sympy.Expr:
        value = read(text).subs(self.known)
        if value.free_symbols:
            raise ValueError(f"Error: {min(map(str, value.free_symbols))} is unknown")
        return value


@functools.lru_cache(maxsize=4096)
def root_of(equation: str) -> tuple[str, sympy.Expr]:
    """`3*x+5=20` → (`x`, 5). ValueError where that is no linear equation with one unknown and one
    root."""
    if equation.count("=") != 1:
        raise ValueError("Error: an equation has one =")
    left, right = map(read, equation.split("="))
    difference = sympy.expand(left - right)
    unknowns = difference.free_symbols
    if len(unknowns) != 1:
        raise ValueError(f"Error: {len(unknowns)} unknowns instead of one")
    (unknown,) = unknowns
    if not difference.is_polynomial(unknown) or sympy.degree(difference, unknown) != 1:
        raise ValueError("Error: the equation is not linear")
    return str(unknown), -difference.coeff(unknown, 0) / difference.coeff(unknown, 1)


@functools.lru_cache(maxsize=4096)
def expanded(product: str) -> str:
    """`4*(x+3)` → `4*x+12`."""
    return shown(sympy.expand(read(product)))


def shown(value: sympy.Expr) -> str:
    """Without spaces; a number as an integer or a decimal of ten digits."""
    if value.is_number:
        return str(value) if value.is_Integer else f"{float(value):.10g}"
    return str(value).replace(" ", "").replace("**", "^")


def read(text: str) -> sympy.Expr:
    """The expression that `text` writes, of numbers, single letters, + - * / ^ and brackets.
    ValueError otherwise."""
    if len(text) > LONGEST:
        raise ValueError(f"Error: more than {LONGEST} characters")
    try:
        return _value(ast.parse(text.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, UnicodeError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError(f"Error: cannot read {text.encode(errors='replace').decode()}") from None


def _value(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Constant(value=int() | float() as number) if (
            type(number) is not bool and abs(number) <= LARGEST
        ):
            return sympy.Rational(str(number))
        case ast.Name(id=letter) if letter in string.ascii_letters:
            return sympy.Symbol(letter)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SYNTAX:
            one, two = _value(left), _value(right)
            if type(op) is ast.Pow and not (two.is_Integer and 0 <= two <= LARGEST_EXPONENT):
                raise ValueError(f"Error: exponent {two}")
            value = SYNTAX[type(op)](one, two)
            if value.has(sympy.zoo, sympy.nan):
                raise ValueError("Error: division by 0")
            if _terms(value) > MOST_TERMS or any(
                max(abs(one.p), one.q) > LARGEST for one in value.atoms(sympy.Rational)
            ):
                raise ValueError("Error: too large")
            return value
    raise ValueError(f"Error: cannot read {ast.unparse(node)}")


def _terms(value: sympy.Expr) -> int:
    """At least as many as there are when it is multiplied out."""
    if value.is_Add:
        return sum(map(_terms, value.args))
    if value.is_Mul:
        return math.prod(map(_terms, value.args))
    return _terms(value.base) ** abs(int(value.exp)) if value.is_Pow else 1
