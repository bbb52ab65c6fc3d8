"""Named SQL statements, read from `store/sql/*.sql`.

A statement starts at a line `-- name: it` and runs to the next one. Parameters are written
`:it`, as psql has them, and become psycopg's `%(it)s`. Statements with parameters have their
percent signs doubled, as psycopg wants; those without are run without any.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

SQL_DIRECTORY = Path(__file__).parent / "sql"

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    (?P<keep> '(?:[^']|'')*' | "[^"]*" | :: )   # strings, quoted names, casts
  | (?P<comment> --[^\n]* )
  | (?<![\w\]]) : (?P<parameter> [a-z_]\w* )    # but not a slice, as in x[1:n]
    """,
    re.VERBOSE,
)


class Queries(Mapping[str, bytes]):
    """The statements of one file, by name, ready for `execute`."""

    def __init__(self, text: str, source: str) -> None:
        parts = _NAME.split(text)
        names, bodies = parts[1::2], parts[2::2]
        if len(set(names)) != len(names):
            raise ValueError(f"{source} names a statement twice")
        self._statements = {name: _prepare(body) for name, body in zip(names, bodies, strict=True)}
        self._source = source

    def __getitem__(self, name: str) -> bytes:
        return self._statements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._statements)

    def __len__(self) -> int:
        return len(self._statements)

    def __repr__(self) -> str:
        return f"Queries({self._source}: {', '.join(self._statements)})"


@cache
def load(name: str) -> Queries:
    """The statements of `store/sql/<name>.sql`."""
    path = SQL_DIRECTORY / f"{name}.sql"
    return Queries(path.read_text(encoding="utf-8"), path.name)


def numbered(statement: bytes, names: Sequence[str]) -> bytes:
    """The same statement with these parameters as $1, $2, …, as the server itself has them."""
    for number, name in enumerate(names, 1):
        statement = statement.replace(b"%%(%b)s" % name.encode(), b"$%d" % number)
    return statement.replace(b"%%", b"%")


def _prepare(body: str) -> bytes:
    has_parameters = any(match["parameter"] for match in _TOKEN.finditer(body))
    if has_parameters:
        body = body.replace("%", "%%")
    text = _TOKEN.sub(_token, body)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()).encode()


def _token(match: re.Match[str]) -> str:
    if match["parameter"]:
        return f"%({match['parameter']})s"
    return match["keep"] or ""
