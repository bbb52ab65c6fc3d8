"""Users and what they show, as SQLAlchemy Core describes them; see `store.schema`."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from store.schema import metadata

_TIME = DateTime(timezone=True)
_NOW = text("now()")

users = Table(
    "users",
    metadata,
    Column("id", Text, primary_key=True),
    Column("email", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("password", Text),
    Column("roles", ARRAY(Text), nullable=False),
    Column("source", Text, nullable=False, server_default=text("'local'")),
    Column("disabled", Boolean, nullable=False, server_default=text("false")),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    Column("created_at", _TIME, nullable=False, server_default=_NOW),
    Column("updated_at", _TIME, nullable=False, server_default=_NOW),
    Column("signed_in_at", _TIME),
    UniqueConstraint("email"),
    CheckConstraint("email = lower(email)", name="email"),
    CheckConstraint("roles <@ ARRAY['viewer', 'operator', 'billing', 'admin']", name="roles"),
    CheckConstraint("source IN ('local', 'oidc')", name="source"),
)

user_identities = Table(
    "user_identities",
    metadata,
    Column("issuer", Text, primary_key=True),
    Column("subject", Text, primary_key=True),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("created_at", _TIME, nullable=False, server_default=_NOW),
    Index(None, "user_id"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("id", Text, nullable=False),
    Column("user_id", Text, ForeignKey("users.id"), nullable=False),
    Column("method", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("user_agent", Text, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default=_NOW),
    Column("seen_at", _TIME, nullable=False, server_default=_NOW),
    Column("expires_at", _TIME, nullable=False),
    UniqueConstraint("id"),
    CheckConstraint("octet_length(digest) = 32", name="digest"),
    CheckConstraint("method IN ('password', 'oidc')", name="method"),
    Index(None, "user_id"),
)

admin_tokens = Table(
    "admin_tokens",
    metadata,
    Column("id", Text, primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("user_id", Text, ForeignKey("users.id")),
    Column("name", Text, nullable=False),
    Column("permissions", ARRAY(Text), nullable=False),
    Column("created_by", Text, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default=_NOW),
    Column("expires_at", _TIME),
    Column("last_used_at", _TIME),
    Column("revoked_at", _TIME),
    UniqueConstraint("digest"),
    CheckConstraint("octet_length(digest) = 32", name="digest"),
    Index(None, "user_id"),
)

invitations = Table(
    "invitations",
    metadata,
    Column("user_id", Text, ForeignKey("users.id"), primary_key=True),
    Column("digest", LargeBinary, nullable=False),
    Column("created_at", _TIME, nullable=False, server_default=_NOW),
    Column("expires_at", _TIME, nullable=False),
    UniqueConstraint("digest"),
    CheckConstraint("octet_length(digest) = 32", name="digest"),
)

sign_in_attempts = Table(
    "sign_in_attempts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("last_ms", BigInteger, nullable=False, server_default=text("0")),
    Column("until_ms", BigInteger, nullable=False, server_default=text("0")),
    CheckConstraint("failures >= 0", name="failures"),
)
