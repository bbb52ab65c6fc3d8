"""Idempotency keys, and who has answers given again, as SQLAlchemy Core describes them.

Importing this adds them to `store.schema.metadata`. What they hold is told in the migration.
"""

from sqlalchemy import (
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    text,
)
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

answer_cache_policies = Table(
    "answer_cache_policies",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    Column("ttl_s", Integer, nullable=False),
    Column("charge", Text, nullable=False),
)
