"""The reconciler's tables as SQLAlchemy Core describes them; see `store.schema`."""

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Identity,
    Index,
    LargeBinary,
    Table,
    Text,
    text,
)

from store.schema import metadata, witnesses

_TIME = DateTime(timezone=True)

reconcile_cursors = Table(
    "reconcile_cursors",
    metadata,
    Column("feed", Text, primary_key=True),
    Column("at", _TIME, nullable=False),
    Column("place", Text, nullable=False),
    Column("moved_at", _TIME, nullable=False),
)

reconciled_accounts = Table(
    "reconciled_accounts",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("reserved_micro", BigInteger, nullable=False),
    Column("posted_micro", BigInteger, nullable=False),
    Column("credit_micro", BigInteger, nullable=False),
    Column("link", LargeBinary),
)

differences = Table(
    "differences",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("measure", BigInteger, nullable=False),
    Column("noticed_at", _TIME, nullable=False),
    Column("raised_at", _TIME),
    Column("looked_at", _TIME),
    Column("resolved_at", _TIME),
    Column("resolution", Text),
    Column("note", Text, nullable=False),
    Index(
        "differences_open_key",
        "kind",
        "subject",
        unique=True,
        postgresql_where=text("resolved_at IS NULL"),
    ),
    Index(
        "differences_unraised_idx",
        "noticed_at",
        postgresql_where=text("resolved_at IS NULL AND raised_at IS NULL"),
    ),
    Index(
        "differences_closed_idx",
        "kind",
        "subject",
        postgresql_where=text("resolution = 'closed'"),
    ),
    Index(None, "resolved_at"),
)

Index("witnesses_recorded_at_idx", witnesses.c.recorded_at, postgresql_using="brin")
