"""Alembic's entry point: one migrator at a time, each migration one short transaction.

The address comes from the caller (`store.migrate`), else from the environment. A migration
that would hold a lock for long fails instead, and can be run again.
"""

import os
import re

import msgspec
from alembic import context
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.engine import Connection
from sqlalchemy.pool import NullPool

from core.settings import read_settings
from store import (
    schema_idempotency,
    schema_launches,
    schema_leader,
    schema_limits,
    schema_providers,
    schema_reconcile,
    schema_registry,
    schema_responses,
    schema_rollouts,
    schema_safety,
    schema_scaling,
    schema_usage,
    schema_users,
)
from store.schema import metadata

ADVISORY_LOCK = 0x4845_4144  # "HEAD"; any fixed number that is ours
WAIT_FOR_OTHER_MIGRATOR = "120s"
LOCK_TIMEOUT = "4s"
STATEMENT_TIMEOUT = "60s"

PARTITION = re.compile(r"(usage|witnesses)_(y\d{4}m\d{2}|other|hourly|daily)")

for tables in (
    schema_idempotency,
    schema_launches,
    schema_leader,
    schema_limits,
    schema_providers,
    schema_reconcile,
    schema_registry,
    schema_responses,
    schema_rollouts,
    schema_safety,
    schema_scaling,
    schema_usage,
    schema_users,
):
    assert tables.metadata is metadata, "importing it adds its tables"


class MigrationSettings(msgspec.Struct, frozen=True):
    """What a migration needs to know."""

    database_url: str


def database_url() -> str:
    """Where to migrate."""
    given = context.config.attributes.get("database_url")
    if given is not None:
        return str(given)
    # This is the main module of the command `alembic`.
    return read_settings(MigrationSettings, os.environ).database_url  # noqa: TID251 - Alembic runs this file itself


def is_ours(name: str | None, kind: str, _parents: object) -> bool:
    """Partitions come and go with the months: what they are is told by their parents."""
    return kind != "table" or name is None or PARTITION.fullmatch(name) is None


def migrate(connection: Connection) -> None:
    """Run whatever command Alembic was given."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=True,
        compare_type=True,
        include_name=is_ours,
    )
    with context.begin_transaction():
        context.run_migrations()


def online() -> None:
    """Connect, wait for our turn, migrate."""
    url = make_url(database_url()).set(drivername="postgresql+psycopg")
    # What is locked is then read as it is, whatever the database's own level.
    engine = create_engine(url, poolclass=NullPool, isolation_level="READ COMMITTED")
    with engine.connect() as connection:
        with connection.begin():
            connection.execute(text(f"SET lock_timeout = '{WAIT_FOR_OTHER_MIGRATOR}'"))
            connection.execute(text(f"SELECT pg_advisory_lock({ADVISORY_LOCK})"))
            connection.execute(text(f"SET lock_timeout = '{LOCK_TIMEOUT}'"))
            connection.execute(text(f"SET statement_timeout = '{STATEMENT_TIMEOUT}'"))
        migrate(connection)
    engine.dispose()


if context.is_offline_mode():
    context.configure(dialect_name="postgresql", target_metadata=metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    online()
