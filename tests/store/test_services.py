"""The fixtures themselves: both services answer, survive a kill and come back."""

import psycopg
import pytest
import redis

pytestmark = pytest.mark.services


def test_postgres_keeps_what_was_committed_before_a_kill(own_postgres):
    url = own_postgres.create_database("kept")
    with psycopg.connect(url) as connection:
        assert connection.execute("SHOW server_version_num").fetchone()[0].startswith("18")
        connection.execute("CREATE TABLE kept AS SELECT 7 AS n")
    own_postgres.running.kill()
    own_postgres.running.start()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (7,)


def test_valkey_forgets_everything_in_a_kill(own_valkey):
    with redis.Redis.from_url(own_valkey.embedded.url) as client:
        client.set("a", 1)
    own_valkey.running.kill()
    own_valkey.running.start()
    with redis.Redis.from_url(own_valkey.embedded.url) as client:
        assert client.get("a") is None


def test_a_wrong_password_opens_neither(postgres_server, valkey_server):
    url = postgres_server.embedded.maintenance_url
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url.replace("headworks:", "headworks:x"))
    port = valkey_server.embedded.port
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).ping()
