"""The table of limits, as SQLAlchemy Core describes it: for Alembic. See `store.schema`."""

from sqlalchemy import BigInteger, CheckConstraint, Column, Table, Text

from core.allowance import FIELDS
from store.schema import metadata

__all__ = ["limits", "metadata"]

limits = Table(
    "limits",
    metadata,
    Column("subject", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("model", Text, primary_key=True, server_default=""),
    *(Column(name, BigInteger, nullable=True) for name in FIELDS),
    CheckConstraint("subject IN ('tier', 'tier_key', 'tenant', 'key')", name="subject"),
    CheckConstraint(f"0 <= least({', '.join(FIELDS)})", name="least"),
)
