"""A look through the code that computes money, for anything that is not a whole number."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPUTES = [
    "core/accounts.py",
    "core/caps.py",
    "core/corrections.py",
    "core/grants.py",
    "core/ledger.py",
    "core/metering.py",
    "core/money.py",
    "core/pricing.py",
    "core/requests.py",
    "core/spending.py",
    "core/witnesses.py",
    "store/accounts.py",
    "store/ledger.py",
    "store/prices.py",
]
SQL = ["migrations/versions/0004_accounts.sql", "store/sql/ledger.sql", "store/sql/accounts.sql"]
MILLISECONDS = re.compile(r"_ms\b")
SQL_FLOAT = re.compile(r"^.*\b(double precision|real|float\d?)\b.*$", re.MULTILINE)


@functools.cache
def floats_in_the_code() -> tuple[str, ...]:
    """Where there is one: a literal, a true division, a call or a type. Milliseconds may be."""
    found: list[str] = []
    for name in COMPUTES:
        found += floats_in((ROOT / name).read_text(), name)
    for name in SQL:
        found += [
            f"{name}: {match[0].strip()}"
            for match in SQL_FLOAT.finditer((ROOT / name).read_text())
            if not MILLISECONDS.search(match[0])
        ]
    return tuple(found)


def floats_in(source: str, name: str) -> list[str]:
    """The same of one module's text."""
    timings = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign) and MILLISECONDS.search(ast.unparse(node.target))
    ]
    found = [
        (getattr(node, "lineno", 0), ast.unparse(node))
        for node in ast.walk(ast.parse(source))
        if _is_float(node)
    ]
    return [
        f"{name}:{line}: {text}"
        for line, text in found
        if not any(line in lines for lines in timings)
    ]


def _is_float(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=float()):
            return True
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
            return True
        case ast.Name(id="float" | "Decimal" | "round"):
            return True
        case _:
            return False
