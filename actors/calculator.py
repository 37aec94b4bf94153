"""An environment with one tool: `<37*48>` is answered with `=1776:`, anything else is the final answer."""

import ast
import operator

LONGEST = 40  # characters of an expression
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """The reward is 1 for the right final answer, and `call_reward` for each call that can be worked out."""

    def __init__(self, call_reward: float = 0.0) -> None:
        self._call_reward = call_reward

    def reset(self, answer: str, **columns: object) -> None:
        self._answer = answer

    def step(self, completion: str) -> tuple[str, float, bool]:
        said = completion.strip()
        if not (said.startswith("<") and said.endswith(">")):
            return "", float(said == self._answer), True
        try:
            return f"={evaluate(said[1:-1])}:", self._call_reward, False
        except ValueError:
            return "=error:", 0.0, False


def evaluate(expression: str) -> int:
    """The value of whole numbers with +, -, * and parentheses. Raises ValueError for all else.

    The tree is walked, nothing is run, and without powers a short expression has a short value.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"calculator: got {len(expression)} characters, expected at most {LONGEST}")
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"calculator: {expression!r} is no expression: {type(error).__name__}") from error


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(f"calculator: got {type(node).__name__}, expected whole numbers with +, -, * and parentheses")
