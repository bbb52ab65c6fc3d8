"""Safety policies' tables as SQLAlchemy Core describes them; see `store.schema`."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import JSONB

from store.schema import metadata

_TIME = DateTime(timezone=True)

safety_policies = Table(
    "safety_policies",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("rules", JSONB, nullable=False),
    Column("hold_chars", Integer, nullable=False),
    Column("created_at", _TIME, nullable=False),
)

tenant_safety = Table(
    "tenant_safety",
    metadata,
    Column("tenant_id", Text, ForeignKey("tenants.id"), primary_key=True),
    Column("policy", Text, nullable=False),
    Column("version", Integer),
    Column("keep_text", Boolean, nullable=False),
    Column("updated_at", _TIME, nullable=False),
    ForeignKeyConstraint(
        ["policy", "version"],
        ["safety_policies.name", "safety_policies.version"],
        name="tenant_safety_policy_fkey",
    ),
    Index("tenant_safety_policy_idx", "policy"),
)

safety_hits = Table(
    "safety_hits",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", _TIME, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("rule", Text, nullable=False),
    Column("stage", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("choice", Integer, nullable=False),
    Column("chars", Integer, nullable=False),
    Column("text", Text),
    Index("safety_hits_tenant_id_idx", "tenant_id", "id"),
)
