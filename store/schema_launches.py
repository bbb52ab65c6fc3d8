"""The table of what launchers were asked for, as SQLAlchemy Core describes it."""

from sqlalchemy import CheckConstraint, Column, DateTime, ForeignKey, Index, Integer, Table, Text

from store.schema import metadata

_TIME = DateTime(timezone=True)

launches = Table(
    "launches",
    metadata,
    Column("replica_id", Text, primary_key=True),
    Column("deployment", Text, ForeignKey("deployments.name"), nullable=False),
    Column("launcher", Text, nullable=False),
    Column("home", Text, nullable=False),
    Column("asked_at", _TIME, nullable=False, server_default="now()"),
    Column("started_at", _TIME),
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("last_failure", Text, nullable=False, server_default=""),
    Column("retry_at", _TIME),
    Column("stop_reason", Text, nullable=False, server_default=""),
    Column("stop_asked_at", _TIME),
    Column("stop_grace_ms", Integer, nullable=False, server_default="0"),
    CheckConstraint("launcher IN ('external', 'local')", name="launcher"),
    CheckConstraint("failures >= 0", name="failures"),
    CheckConstraint("(stop_reason = '') = (stop_asked_at IS NULL)", name="stop"),
    Index(None, "deployment"),
)
