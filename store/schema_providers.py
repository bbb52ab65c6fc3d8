"""Outside providers as SQLAlchemy Core describes them; see `store.schema`."""

from sqlalchemy import BigInteger, CheckConstraint, Column, DateTime, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from store.schema import metadata

_TIME = DateTime(timezone=True)

providers = Table(
    "providers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("dialect", Text, nullable=False),
    Column("base_url", Text, nullable=False),
    Column("key_id", Text),
    Column("nonce", LargeBinary),
    Column("sealed", LargeBinary),
    Column("settings", JSONB, nullable=False, server_default=text("'{}'")),
    Column("version", BigInteger, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default=text("now()")),
    Column("updated_at", _TIME, nullable=False, server_default=text("now()")),
    CheckConstraint("dialect IN ('openai', 'anthropic')", name="dialect"),
    CheckConstraint("num_nulls(key_id, nonce, sealed) IN (0, 3)", name="key"),
)
