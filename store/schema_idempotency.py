"""The table of idempotency keys as SQLAlchemy Core describes it.

Importing this adds it to `store.schema.metadata`. What it holds is told in the migration.
"""

from sqlalchemy import Column, DateTime, Index, Integer, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY

from store.schema import metadata

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("scope", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("fingerprint", Text, nullable=False),
    Column("request_id", Text(collation="C"), nullable=False),
    Column("holder", Text, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("superseded", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("answer", LargeBinary),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Index(None, "expires_at"),
)
