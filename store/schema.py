"""Tables as SQLAlchemy Core describes them: the ledger's here, others in `schema_registry`.

A description for Alembic and for filtered lists, not a mapper. What cannot be said here is
in the migrations: triggers, functions, storage parameters.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)


def _text(name: str, *, primary_key: bool = False) -> Column[str]:
    return Column(name, Text, nullable=False, primary_key=primary_key)


def _int(name: str, *, nullable: bool = False, primary_key: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable, primary_key=primary_key)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


def _milliseconds(name: str) -> Column[float]:
    return Column(name, Double, nullable=True)


price_books = Table(
    "price_books",
    metadata,
    _text("id", primary_key=True),
    _text("description"),
    Column("created_at", DateTime(timezone=True), nullable=False),
)

prices = Table(
    "prices",
    metadata,
    _text("id", primary_key=True),
    Column("book", Text, ForeignKey("price_books.id"), nullable=False),
    _text("model"),
    _text("tier"),
    _text("service_class"),
    _text("currency"),
    _int("input_micro"),
    _int("cached_input_micro"),
    _int("output_micro"),
    _int("request_micro"),
    _int("cache_write_5m_micro"),
    _int("cache_write_1h_micro"),
    _int("reasoning_micro"),
    _int("effective_ms"),
    Column("created_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("book", "model", "tier", "service_class", "effective_ms"),
)

accounts = Table(
    "accounts",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    _int("hard_cap_micro", nullable=True),
    _int("posted_micro"),
    _int("reserved_micro"),
    _int("entries"),
    Column("opened_at", DateTime(timezone=True), nullable=False),
)

entries = Table(
    "entries",
    metadata,
    _text("tenant_id", primary_key=True),
    _int("seq", primary_key=True),
    _text("request_id"),
    _text("kind"),
    _int("reserved_delta_micro"),
    _int("posted_delta_micro"),
    _int("reserved_micro"),
    _int("posted_micro"),
    Column("at", DateTime(timezone=True), nullable=False),
)

reservations = Table(
    "reservations",
    metadata,
    _text("request_id", primary_key=True),
    _text("tenant_id"),
    _text("gateway_id"),
    _int("reserved_micro"),
    Column("opened_at", DateTime(timezone=True), nullable=False),
)

refusals = Table(
    "refusals",
    metadata,
    _text("request_id", primary_key=True),
    _text("tenant_id"),
    _text("reason"),
    _int("reserved_micro"),
    _int("posted_micro"),
    _int("hard_cap_micro"),
    Column("at", DateTime(timezone=True), nullable=False),
    Index(None, "at"),
)

usage = Table(
    "usage",
    metadata,
    _text("request_id", primary_key=True),
    _text("tenant_id"),
    _text("key_id"),
    _text("gateway_id"),
    _text("model"),
    _text("version"),
    _text("region"),
    _text("service_class"),
    _text("dialect"),
    _text("endpoint"),
    _flag("stream"),
    _text("price_id"),
    _int("prompt_tokens"),
    _int("max_tokens"),
    Column("choices", Integer, nullable=False),
    _int("amount_micro"),
    _int("reserved_micro"),
    _text("state"),
    Column("cause", Text),
    Column("settled_by", Text),
    Column("attempts", Integer, nullable=False),
    _int("metered_prompt_tokens"),
    _int("metered_cached_tokens"),
    _int("metered_output_tokens"),
    _int("accepted_tokens"),
    _int("delivered_tokens"),
    _int("billed_micro"),
    _int("bill_limit_micro", nullable=True),
    _milliseconds("queue_ms"),
    _milliseconds("prefill_ms"),
    _milliseconds("first_token_ms"),
    _milliseconds("inter_token_ms"),
    _milliseconds("total_ms"),
    _int("created_ms"),
    _int("ended_ms", nullable=True),
    Index(None, "tenant_id", "created_ms"),
)

witnesses = Table(
    "witnesses",
    metadata,
    _text("request_id", primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    _text("source", primary_key=True),
    _text("replica_id"),
    _int("prompt_tokens"),
    _int("cached_tokens"),
    _int("output_tokens"),
    _flag("exact"),
    _flag("final"),
    _text("cause"),
    _int("at_ms"),
    Column("recorded_at", DateTime(timezone=True), nullable=False),
)

gateways = Table(
    "gateways",
    metadata,
    _text("id", primary_key=True),
    _text("region"),
    Column("lease_ms", Integer, nullable=False),
    Column("started_at", DateTime(timezone=True), nullable=False),
    Column("last_seen", DateTime(timezone=True), nullable=False),
    _flag("retired"),
)
