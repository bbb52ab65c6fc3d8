"""Rollouts' tables as SQLAlchemy Core describes them; see `store.schema`."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from store.schema import metadata

_TIME = DateTime(timezone=True)

rollouts = Table(
    "rollouts",
    metadata,
    Column("name", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("region", Text, nullable=False),
    Column("stable", Text, ForeignKey("deployments.name"), nullable=False),
    Column("canary", Text, ForeignKey("deployments.name"), nullable=False),
    Column("stable_version", Text, ForeignKey("model_versions.version"), nullable=False),
    Column("canary_version", Text, ForeignKey("model_versions.version"), nullable=False),
    Column("asked", JSONB, nullable=False),
    Column("body", JSONB, nullable=False),
    Column("wanted", JSONB, nullable=False),
    Column("state", Text, nullable=False),
    Column("ended", Boolean, nullable=False),
    Column("closed", Boolean, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("created_at", _TIME, nullable=False),
    Column("updated_at", _TIME, nullable=False),
    Index(
        "rollouts_moving_key",
        "tenant_id",
        "model",
        unique=True,
        postgresql_where=text("NOT ended"),
    ),
    Index("rollouts_open_idx", "name", postgresql_where=text("NOT closed")),
)

rollout_events = Table(
    "rollout_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("rollout", Text, ForeignKey("rollouts.name"), nullable=False),
    Column("at", _TIME, nullable=False),
    Column("actor", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("before", Text, nullable=False),
    Column("after", Text, nullable=False),
    Column("percent", Integer, nullable=False),
    Column("reasons", JSONB, nullable=False),
    Column("verdicts", JSONB, nullable=False),
    Column("sample", JSONB),
    Index("rollout_events_rollout_id_idx", "rollout", "id"),
)
