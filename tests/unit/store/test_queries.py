"""Named statements: found by name, with psycopg's parameters."""

import pytest

from store.queries import Queries, load


def prepared(text: str) -> str:
    return Queries(f"-- name: it\n{text}", "test.sql")["it"].decode()


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("SELECT :tenant_id", "SELECT %(tenant_id)s"),
        ("SELECT :a::text, ':b', \":c\"", "SELECT %(a)s::text, ':b', \":c\""),
        ("SELECT x[1:n], :n", "SELECT x[1:n], %(n)s"),
        ("SELECT 7 % :n, 'a%b'", "SELECT 7 %% %(n)s, 'a%%b'"),
        ("SELECT 7 % 2", "SELECT 7 % 2"),
        ("SELECT 'it''s :a', :b", "SELECT 'it''s :a', %(b)s"),
        ("SELECT 1 -- not :this\n\nFROM t -- 100%", "SELECT 1\nFROM t"),
    ],
)
def test_parameters_are_written_as_psql_has_them(written, sent):
    assert prepared(written) == sent


def test_a_file_is_its_statements():
    queries = Queries("-- about\n-- name: a\nSELECT 1\n-- name: b\nSELECT 2\n", "test.sql")
    assert list(queries) == ["a", "b"]
    assert len(queries) == 2
    assert queries["b"] == b"SELECT 2"
    assert repr(queries) == "Queries(test.sql: a, b)"
    with pytest.raises(KeyError):
        queries["c"]


def test_a_name_is_used_once():
    with pytest.raises(ValueError, match=r"test\.sql names a statement twice"):
        Queries("-- name: a\nSELECT 1\n-- name: a\nSELECT 2\n", "test.sql")


def test_files_are_read_once():
    assert load("ledger") is load("ledger")
    assert b"ledger_apply(" in load("ledger")["apply"]
