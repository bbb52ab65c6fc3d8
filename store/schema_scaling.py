"""Scaling policies, states and decisions as SQLAlchemy Core describes them; see `store.schema`."""

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import JSONB

from store.schema import metadata

_TIME = DateTime(timezone=True)

scaling_policies = Table(
    "scaling_policies",
    metadata,
    Column("target", Text, primary_key=True),
    Column("deployment", Text, ForeignKey("deployments.name")),
    Column("model", Text, ForeignKey("models.name"), nullable=False),
    Column("body", JSONB, nullable=False),
    Column("version", BigInteger, nullable=False, server_default="1"),
    Column("created_at", _TIME, nullable=False, server_default="now()"),
    Column("updated_at", _TIME, nullable=False, server_default="now()"),
    Index(None, "model"),
)

scaling_states = Table(
    "scaling_states",
    metadata,
    Column("deployment", Text, ForeignKey("deployments.name"), primary_key=True),
    Column("state", JSONB, nullable=False),
    Column("decision", JSONB, nullable=False),
    Column("decided_at", _TIME, nullable=False, server_default="now()"),
    Column("told_at", _TIME, nullable=False, server_default="now()"),
)

scaling_decisions = Table(
    "scaling_decisions",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("deployment", Text, nullable=False),
    Column("at", _TIME, nullable=False, server_default="now()"),
    Column("before", Integer),
    Column("desired", Integer, nullable=False),
    Column("wake", Integer, nullable=False),
    Column("start", Integer, nullable=False),
    Column("stop", Integer, nullable=False),
    Column("reasons", JSONB, nullable=False),
    Column("alarms", JSONB, nullable=False),
    Index(None, "deployment", "id"),
)
