"""The rollups' tables as SQLAlchemy Core describes them.

Importing this adds them to `store.schema.metadata`. What they hold is told in the migration.
"""

from sqlalchemy import BigInteger, Column, DateTime, Index, Integer, Table, Text

from store.schema import metadata

DIMENSIONS = ("key_id", "model", "version", "cause", "service_class")
SUMS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "output_tokens",
    "reasoning_tokens",
    "accepted_tokens",
    "delivered_tokens",
    "billed_micro",
    "adjusted_micro",
    "first_token_count",
    "first_token_us",
    "inter_token_count",
    "inter_token_us",
)

usage_sums = Table(
    "usage_sums",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("span_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("starts_ms", BigInteger, primary_key=True, autoincrement=False),
    Column("month", Integer, primary_key=True, autoincrement=False),
    *(Column(dimension, Text, primary_key=True) for dimension in DIMENSIONS),
    *(Column(column, BigInteger, nullable=False) for column in SUMS),
    Index(None, "key_id", "starts_ms"),
    postgresql_partition_by="LIST (span_ms)",
)

rollup_positions = Table(
    "rollup_positions",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False, server_default="0"),
    Column("rolled_at", DateTime(timezone=True), nullable=False, server_default="now()"),
)
