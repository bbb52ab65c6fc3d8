"""Tables as SQLAlchemy Core describes them: the ledger's here, others in `schema_registry`.

A description for Alembic and for filtered lists, not a mapper. What cannot be said here is
in the migrations: triggers, functions, storage parameters.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

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
    _flag("prepaid"),
    _int("credit_micro"),
    Column("caps", Integer, nullable=False),
    Column("head", LargeBinary, nullable=False),
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
    _int("credit_delta_micro"),
    _int("credit_micro"),
    _text("adjustment_id"),
    _text("reason"),
    _text("author"),
    Column("chain", LargeBinary, nullable=True),
)

adjustments = Table(
    "adjustments",
    metadata,
    _text("id", primary_key=True),
    _text("tenant_id"),
    _int("entry"),
    Column("word", JSONB, nullable=False),
)

caps = Table(
    "caps",
    metadata,
    Column("tenant_id", Text, ForeignKey("accounts.tenant_id"), primary_key=True),
    _text("key_id", primary_key=True),
    _text("period", primary_key=True),
    _int("soft_micro", nullable=True),
    _int("hard_micro", nullable=True),
    Column("since", Date, nullable=False),
)

cap_windows = Table(
    "cap_windows",
    metadata,
    _text("tenant_id", primary_key=True),
    _text("key_id", primary_key=True),
    _text("period", primary_key=True),
    Column("starts", Date, primary_key=True),
    _int("posted_micro"),
    _int("reserved_micro"),
    Column("soft_passed_at", DateTime(timezone=True), nullable=True),
    _flag("announced"),
    ForeignKeyConstraint(
        ["tenant_id", "key_id", "period"],
        ["caps.tenant_id", "caps.key_id", "caps.period"],
        ondelete="CASCADE",
    ),
    Index(
        "cap_windows_unannounced_idx",
        "soft_passed_at",
        postgresql_where=text("soft_passed_at IS NOT NULL AND NOT announced"),
    ),
)

# What an open request has in common with an ended one.
_ASKED = (
    ("tenant_id", Text),
    ("key_id", Text),
    ("gateway_id", Text),
    ("model", Text),
    ("version", Text),
    ("region", Text),
    ("service_class", Text),
    ("dialect", Text),
    ("endpoint", Text),
    ("stream", Boolean),
    ("price_id", Text),
    ("prompt_tokens", BigInteger),
    ("max_tokens", BigInteger),
    ("choices", Integer),
    ("amount_micro", BigInteger),
    ("reserved_micro", BigInteger),
    ("day", Date),
    ("created_ms", BigInteger),
)


def _asked() -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name, kind in _ASKED]


reservations = Table(
    "reservations",
    metadata,
    _text("request_id", primary_key=True),
    Column("month", Integer, nullable=False),
    *_asked(),
    _int("floor_micro", nullable=True),
    Column("opened_at", DateTime(timezone=True), nullable=False),
)

refusals = Table(
    "refusals",
    metadata,
    _text("request_id", primary_key=True),
    _text("tenant_id"),
    _text("reason"),
    _text("limit_name"),
    _int("reserved_micro"),
    _int("posted_micro"),
    _int("hard_cap_micro"),
    _int("fits_micro"),
    Column("at", DateTime(timezone=True), nullable=False),
    Index(None, "at"),
)

usage = Table(
    "usage",
    metadata,
    _text("request_id", primary_key=True),
    Column("month", Integer, primary_key=True, autoincrement=False),
    *_asked(),
    _int("floor_micro", nullable=True),
    _text("cause"),
    _text("settled_by"),
    Column("attempts", Integer, nullable=False),
    _int("metered_prompt_tokens"),
    _int("metered_cached_tokens"),
    _int("metered_cache_write_5m_tokens"),
    _int("metered_cache_write_1h_tokens"),
    _int("metered_output_tokens"),
    _int("metered_reasoning_tokens"),
    _int("accepted_tokens"),
    _int("delivered_tokens"),
    _int("billed_micro"),
    _int("adjusted_micro"),
    _int("bill_limit_micro", nullable=True),
    _milliseconds("queue_ms"),
    _milliseconds("prefill_ms"),
    _milliseconds("first_token_ms"),
    _milliseconds("inter_token_ms"),
    _milliseconds("total_ms"),
    _int("ended_ms"),
    Index(None, "tenant_id", "created_ms"),
)

usage_corrections = Table(
    "usage_corrections",
    metadata,
    _text("tenant_id", primary_key=True),
    _int("seq", primary_key=True),
    Column("request_id", Text, nullable=False, index=True),
    Column("month", Integer, nullable=False),
    *(
        _int(f"d_{name}")
        for name in (
            "prompt",
            "cached",
            "write_5m",
            "write_1h",
            "output",
            "reasoning",
            "accepted",
            "delivered",
            "billed",
            "adjusted",
        )
    ),
    _text("from_cause"),
    _text("to_cause"),
)

usage_retired = Table(
    "usage_retired",
    metadata,
    _text("tenant_id", primary_key=True),
    Column("month", Integer, primary_key=True, autoincrement=False),
    _int("requests"),
    _int("billed_micro"),
    _int("adjusted_micro"),
)

witnesses = Table(
    "witnesses",
    metadata,
    _text("request_id", primary_key=True),
    Column("month", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    _text("source", primary_key=True),
    _text("replica_id"),
    _int("prompt_tokens"),
    _int("cached_tokens"),
    _int("cache_write_5m_tokens"),
    _int("cache_write_1h_tokens"),
    _int("output_tokens"),
    _int("reasoning_tokens"),
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
    _int("spool_bytes"),
    _int("refused_words"),
)
