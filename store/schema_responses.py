"""Kept responses as SQLAlchemy Core describes them; see `store.schema`."""

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Index, LargeBinary, Table, Text, text

from store.schema import metadata

_TIME = DateTime(timezone=True)

responses = Table(
    "responses",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("previous_id", Text),
    Column("created_at", _TIME, nullable=False, server_default=text("now()")),
    Column("expires_at", _TIME, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("nonce", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Index(None, "expires_at"),
)

response_policies = Table(
    "response_policies",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("keep", Boolean, nullable=False),
    Column("updated_at", _TIME, nullable=False, server_default=text("now()")),
)
