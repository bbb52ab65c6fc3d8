"""The tables as migrated, and the rules that the database keeps by itself."""

import psycopg
import pytest

pytestmark = pytest.mark.services

TENANT = "INSERT INTO tenants (id, name, salt, version) VALUES ('ten_1', 'a', %s, 1)"


@pytest.fixture
def connection(fresh_postgres_url):
    with psycopg.connect(fresh_postgres_url, autocommit=True) as connection:
        yield connection


def _register_version(connection):
    connection.execute("INSERT INTO models (name, family) VALUES ('m', 'llama')")
    connection.execute(
        "INSERT INTO model_versions (version, model, context_tokens, manifest)"
        " VALUES ('v1', 'm', 64, '{}')"
    )


def test_the_audit_log_takes_no_change_and_no_deletion(connection):
    connection.execute(
        "INSERT INTO audit_log (actor, action, subject, detail) VALUES ('a', 'b', 'c', '{}')"
    )
    for change in (
        "UPDATE audit_log SET actor = 'x'",
        "DELETE FROM audit_log",
        "TRUNCATE audit_log",
    ):
        with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
            connection.execute(change)


def test_a_model_version_changes_only_its_state(connection):
    _register_version(connection)
    connection.execute("UPDATE model_versions SET state = 'ready'")
    with pytest.raises(psycopg.errors.RestrictViolation, match="immutable"):
        connection.execute("UPDATE model_versions SET context_tokens = 65")


def test_a_salt_has_sixteen_bytes(connection):
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(TENANT, (b"short",))
    connection.execute(TENANT, (bytes(16),))


def test_two_writers_of_one_stream_queue_behind_each_other(fresh_postgres_url, connection):
    # Without this a reader could see number 2 before number 1 and miss what 1 changed.
    take = "UPDATE change_clock SET value = value + 1 WHERE stream = 'tenancy' RETURNING value"
    with psycopg.connect(fresh_postgres_url) as first:
        assert first.execute(take).fetchone() == (1,)
        connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute(take)
    assert connection.execute(take).fetchone() == (2,)
