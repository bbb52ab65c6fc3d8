"""Fixtures every test may use: one Postgres and one Valkey for a session, fresh data for each.

`postgres_url` is a migrated database of the test module's own; `empty_postgres_url` has no
tables. `valkey_url` is flushed before each test. A test that stops or kills a server asks for
`own_postgres` or `own_valkey` instead, which nobody else uses.
"""

import os
import secrets
from collections.abc import Iterator

import pytest
import pytest_socket
from hypothesis import HealthCheck, Phase, settings

from tests.support.services import PostgresServer, ValkeyServer, open_directory

# Read when torch loads: threads that spin while waiting take the cores of the other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile(
    "headworks",
    # A shared machine's clock proves nothing about the code.
    deadline=None,
    # Nor does it say anything against a property that most drawn states do not reach.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    max_examples=50,
)
# For `make mutants`: a mutant is noticed by the first example that fails, and shrinking that one
# would take minutes of each.
settings.register_profile(
    "mutants",
    parent=settings.get_profile("headworks"),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
settings.load_profile("headworks")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test leaves this machine, but to fetch the one real model."""
    if item.get_closest_marker("model") is None:
        pytest_socket.socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with open_directory("postgres") as directory:
        server = PostgresServer(directory)
        server.running.start()
        yield server
        server.running.stop()


@pytest.fixture(scope="session")
def migrated_template(postgres_server: PostgresServer) -> str:
    from store.migrate import upgrade  # noqa: PLC0415 - tests that need no database load without it

    upgrade(postgres_server.create_database("migrated"))
    return "migrated"


@pytest.fixture(scope="module")
def postgres_url(postgres_server: PostgresServer, migrated_template: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    yield postgres_server.create_database(name, migrated_template)
    postgres_server.drop_database(name)


@pytest.fixture
def fresh_postgres_url(postgres_server: PostgresServer, migrated_template: str) -> Iterator[str]:
    """As `postgres_url`, for one test alone."""
    name = f"test_{secrets.token_hex(6)}"
    yield postgres_server.create_database(name, migrated_template)
    postgres_server.drop_database(name)


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server to stop and kill; its maintenance database is empty."""
    with open_directory("own-postgres") as directory:
        server = PostgresServer(directory)
        server.running.start()
        yield server
        server.running.stop()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.running.start()
    yield server
    server.running.stop()


@pytest.fixture
def valkey_url(valkey_server: ValkeyServer) -> str:
    valkey_server.flush()
    return valkey_server.embedded.url


@pytest.fixture
def own_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """A server to stop and kill."""
    server = ValkeyServer(tmp_path_factory.mktemp("own-valkey"))
    server.running.start()
    yield server
    server.running.stop()
