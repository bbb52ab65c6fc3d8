"""The leaders' table as SQLAlchemy Core describes it; see `store.schema`."""

from sqlalchemy import BigInteger, Column, DateTime, Index, Table, Text

from store.schema import metadata

_TIME = DateTime(timezone=True)

leaders = Table(
    "leaders",
    metadata,
    Column("role", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("taken_at", _TIME, nullable=False),
    Column("expires_at", _TIME, nullable=False),
    # What makes an epoch a key, and its change wait for the transactions of the last one.
    Index("leaders_role_epoch_key", "role", "epoch", unique=True),
)
